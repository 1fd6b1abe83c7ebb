"""`python -m benchmarks.convergence`: ratios and bounds from made-up curves, and the data of its tasks."""

import math
from typing import Any

import pytest
import torch

from benchmarks.convergence.bounds import NAMES, REFERENCE
from benchmarks.convergence.results import task_result
from benchmarks.training.methods import METHODS
from benchmarks.training.tasks import TASKS
from tests.unit.benchmark_results import by_name


def run_of(seed: int, loss: float) -> dict[str, Any]:
    """A curve of three evaluations."""
    return {"seed": seed, "curve": [[0, 5.0, 0], [50, 3.0, 5e5], [100, loss, 1e6]]}


def rows_of(losses: dict[str, list[float]], errors: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
    runs = {name: [run_of(seed, loss) for seed, loss in enumerate(values)] for name, values in losses.items()}
    for name, text in (errors or {}).items():
        runs[name] = [{"seed": seed, "error": text} for seed in range(2)]
    told = {"task": "gpt", "title": "GPT", "unit": "tokens", "units_per_step": 1024, "steps": 100, "parameters": 9}
    whats = {name: METHODS[name].what for name in NAMES}
    return by_name(task_result({**told, "runs": runs}, whats)["methods"])


def test_ratios_are_per_seed_and_bounds_apply_to_their_mean() -> None:
    row = rows_of({REFERENCE: [2.0, 4.0], "int8": [2.2, 3.6]})["int8"]
    assert row["ratio"] == pytest.approx({"mean": 1.0, "low": 0.9, "high": 1.1})
    assert row["loss"] == pytest.approx(2.9) and row["bytes_per_step"] == 1e4
    assert row["holds"] is True
    assert row["curve"][-1] == {"units": 102_400, "loss": pytest.approx(2.9), "bytes": 1e6}
    for ratio, holds in ((1.0099, True), (1.0101, False)):
        assert rows_of({REFERENCE: [2.0, 4.0], "int8": [2.0 * ratio, 4.0 * ratio]})["int8"]["holds"] is holds


def test_without_a_loss_or_the_reference_nothing_is_claimed() -> None:
    losses = {REFERENCE: [2.0, 4.0], "int8": [2.0, math.nan], "topk": [2.0, math.inf]}
    rows = rows_of(losses, {"fp16": "ImportError: no comm_hooks"})
    assert rows["fp16"]["holds"] is False and "comm_hooks" in rows["fp16"]["error"]
    assert rows["int8"]["holds"] is False and rows["int8"]["error"] == "loss is not finite, seed 1"
    assert rows["topk"]["holds"] is None
    row = rows_of({"int8": [2.0, 4.0]}, {REFERENCE: "RuntimeError: gone"})["int8"]
    assert row["ratio"] is None and row["holds"] is None


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_task_is_a_function_of_seed_step_and_rank(name: str) -> None:
    if name == "digits":
        pytest.importorskip("sklearn")
    task, again = TASKS[name](), TASKS[name]()
    inputs, targets = task.batch(3, 5, 1, 2)
    assert all(map(torch.equal, (inputs, targets), again.batch(3, 5, 1, 2)))
    for other in ((4, 5, 1), (3, 6, 1), (3, 5, 0)):
        assert not torch.equal(inputs, task.batch(*other, 2)[0])
    first, second = task.make_model(1), again.make_model(1)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    # Two ranks' parts of the evaluation set have equal sizes, are disjoint, and cover the set.
    (whole,), parts = task.held_out(0, 1), [task.held_out(rank, 2)[0] for rank in range(2)]
    assert len(parts[0][0]) == len(parts[1][0]) == len(whole[0]) / 2
    both = [first(*part).item() for part in parts]
    assert both[0] != both[1] and sum(both) / 2 == pytest.approx(first(*whole).item(), rel=1e-5)
