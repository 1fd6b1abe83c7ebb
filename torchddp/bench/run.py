"""One run: each case in turn, and the document that tables, JSON and plots are made from."""

from __future__ import annotations

import datetime
from dataclasses import asdict
from typing import Any

from rich.console import Console

from torchddp.bench.cases import CASES
from torchddp.bench.courses import COURSES
from torchddp.bench.report import render
from torchddp.bench.settings import Settings
from torchddp.harness.machine import describe_machine
from torchddp.harness.progress import Display, progress_bar
from torchddp.harness.variants import load_class


def new_document(command: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What every saved run begins with; its results are still to come."""
    return {
        "format": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "machine": describe_machine(),
        "settings": settings,
        "results": [],
    }


def _check_what_is_named(settings: Settings) -> None:
    """Find a class or a factory that is not there before the first launch; ArgumentError."""
    if not any(CASES[name].models for name in settings.cases):
        return
    for path in (settings.ours, *settings.peers):
        load_class(path)
    for model in settings.models:
        if ":" in model:
            from torchddp.harness.factory import find_factory

            find_factory(model)


def run(settings: Settings, command: str, console: Console) -> dict[str, Any]:
    """Run the cases, print the report, return the document."""
    _check_what_is_named(settings)
    document = new_document(command, asdict(settings))
    with progress_bar(console) as progress:
        display = Display(progress)
        for name in settings.cases:
            document["results"] += COURSES[name](CASES[name], settings, display)
    console.print(render(document))
    return document
