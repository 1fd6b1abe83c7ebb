"""All cases, and checks of the options that choose them. A user's mistake raises `ArgumentError`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchddp.bench import gradients, memory, step_time
from torchddp.bench.cases import DEFAULT_CASES, BenchCase
from torchddp.harness.model_names import check_model_name
from torchddp.harness.variants import ArgumentError

ALL = "all"
_USERS = (step_time.CASE, gradients.EXPOSED, memory.CASE, gradients.PER_PARAM)
CASES: dict[str, BenchCase] = {case.name: case for case in _USERS}
# The cases of `torchddp bench`, which --case all runs.
USERS_CASES = tuple(CASES)


def parse_options(cases: Sequence[str], texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for given in texts:
        name, equals, text = given.partition("=")
        takers = [CASES[case] for case in cases if name in CASES[case].options]
        if not equals or not takers:
            known = dict.fromkeys(name for case in cases for name in CASES[case].options)
            raise ArgumentError(
                f"--set {given}: must be NAME=VALUE with an option of {', '.join(cases)}: {', '.join(known) or 'none'}."
            )
        for case in takers:
            try:
                found.setdefault(case.name, {})[name] = case.options[name].parse(text)
            except ValueError as error:  # ArgumentError is one
                raise ArgumentError(f"--set {name}: {str(error).rstrip('.')}.") from None
    return found


def check_names(cases: Sequence[str], models: Sequence[str]) -> tuple[str, ...]:
    """The cases to run. Raises `ArgumentError` for an unknown case or model, or a model where no case takes one."""
    for case in cases:
        if case not in CASES and case != ALL:
            raise ArgumentError(f"There is no case '{case}'; choose from {', '.join(CASES)}, {ALL}.")
    chosen = USERS_CASES if ALL in cases else tuple(dict.fromkeys(cases)) or DEFAULT_CASES
    with_models = tuple(case for case in chosen if CASES[case].models)
    if models and not with_models:
        raise ArgumentError(f"--model: {', '.join(chosen)} takes no model.")
    own = {model for case in chosen for model in CASES[case].models}
    for model in models:
        if model not in own:
            check_model_name(model)
    # With --model, only the cases that have models.
    return with_models if models else chosen
