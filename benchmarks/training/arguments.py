"""Shared by both benchmarks' command lines. A user's mistake raises `ArgumentError` with one sentence."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from torchddp.harness.variants import ArgumentError


def choose_methods(text: str, names: Sequence[str], *, always: Collection[str]) -> tuple[str, ...]:
    """'int8, fp16' -> the methods in the order of `names`, plus those that always run; '' selects all."""
    asked = {name for part in text.split(",") if (name := part.strip())}
    for name in sorted(asked):
        if name not in names:
            raise ArgumentError(f"--methods: there is no '{name}'; choose from {', '.join(names)}.")
    return tuple(name for name in names if not asked or name in asked or name in always)


def load_document(path: Path, case: str) -> dict[str, Any]:
    """Load a saved run of this benchmark."""
    try:
        document = json.loads(path.read_text())
        cases = {result["case"] for result in document["results"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"--show: '{path}' is not the JSON of a run: {error}.") from None
    if cases != {case}:
        raise ArgumentError(f"--show: '{path}' holds results of {', '.join(sorted(cases)) or 'nothing'}, not {case}.")
    assert isinstance(document, dict)
    return document
