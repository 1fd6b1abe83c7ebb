"""Results of the programs in benchmarks/: ratios, bounds and predictions from made-up times and curves."""

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.cases import checks
from benchmarks.sharded.bounds import comparisons_of
from benchmarks.sharded.field import FIELD, REFERENCE, choose_variants
from benchmarks.sharded.measure import Contest, WrongTrainingError
from benchmarks.sharded.proof import TOLERANCE, error_of
from benchmarks.sharded.report import render
from benchmarks.sharded.results import MEMORY_KEYS, memory_result, speed_result
from tests.unit import benchmark_results
from tests.unit.benchmark_results import MODEL
from tests.unit.helpers import printed
from torchddp.bench.cases import Job


def test_checks_are_compared_with_the_plain_step_of_their_round() -> None:
    step_ms = np.array([[8.0] * 3, [10.0] * 3, [10.0] * 3, [14.0] * 3, [10.1] * 3, [11.0] * 3, *[[10.0] * 3] * 2])
    result = checks.checks_result(checks.VARIANTS, {**MODEL, "step_ms": step_ms}, 2)
    ratios = {row["name"]: row["to_plain"] for row in result["variants"]}
    assert ratios["no DDP"] is None and ratios["plain"] is None
    assert ratios["find_nonfinite=True"]["median"] == pytest.approx(1.01)
    assert "1.40 [" in printed(checks.table(result))


ALL = choose_variants(())


def speed(step_ms: dict[str, float], **left_out: str) -> dict[str, Any]:
    """One model's result from steps without noise."""
    raw = {**MODEL, "left_out": left_out, "training_errors": dict.fromkeys(step_ms, 4e-7)}
    raw["step_ms"] = {name: np.full(40, value) for name, value in step_ms.items()}
    return speed_result([v for v in ALL if v.name in step_ms or v.name in left_out], raw, 2)


def memory(bytes_of_rank: int = 250_000_000) -> dict[str, Any]:
    """One model's result; in the first, rank 1 holds twice as much, and the last is missing."""
    variants = choose_variants(["torch-zero", "torchddp-auto", "deepspeed"])
    rank = dict.fromkeys(MEMORY_KEYS, bytes_of_rank)
    raws = {v.name: {**MODEL, "left_out": None, "ranks": [{**rank, "bucket_bytes": None}] * 2} for v in variants}
    raws[REFERENCE]["ranks"] = [rank, {key: 2 * value for key, value in rank.items()}]
    raws["deepspeed"] |= {"left_out": "deepspeed is not installed", "ranks": None}
    return memory_result(variants, list(raws.values()), 4)


def document(*results: dict[str, Any]) -> dict[str, Any]:
    return benchmark_results.document(*results) | {"peers": {"fairscale": "0.4.13", "deepspeed": None}}


def test_the_reference_always_runs_and_the_fastest_zero_variant_is_the_opponent() -> None:
    assert [variant.name for variant in choose_variants(["torchddp-auto"])] == [REFERENCE, "torchddp-auto"]
    assert [variant.name for variant in ALL] == list(FIELD)
    result = speed({"torch-ddp": 90, "torch-zero": 80, "torch-zero-fused": 60, "torchddp-c10d": 48})
    found = {row["against"]: (row["opponent"], row["ratio"]["median"]) for row in result["comparisons"]}
    expected = {"ZeRO, best": ("torch-zero-fused", 48 / 60), "ZeRO, default": ("torch-zero", 48 / 80)}
    assert found == {name: (opponent, pytest.approx(ratio)) for name, (opponent, ratio) in expected.items()}
    assert comparisons_of(["torch-zero", "deepspeed"]) == []


def test_the_report_says_whether_each_bound_is_met() -> None:
    steps = {"torch-ddp": 90.0, "torch-zero": 80.0, "deepspeed": 100.0, "torchddp-auto": 35.0}
    text = printed(render(document(speed(steps, fairscale="fairscale is not installed"), memory())))
    assert "fairscale is left out: fairscale is not installed" in text
    lines = text.splitlines()
    (zero,) = (line for line in lines if "ZeRO, default" in line and "torch-zero" in line)
    (deep,) = (line for line in lines if "deepspeed" in line and "0.35 [" in line)
    assert zero.rstrip().endswith("0.45 met") and deep.rstrip().endswith("0.3 missed")


def test_memory_is_that_of_the_largest_rank() -> None:
    rows = {row["name"]: row for row in memory(50_000_000)["variants"]}
    assert rows["torch-ddp"]["largest"] == dict.fromkeys(MEMORY_KEYS, 100_000_000)
    assert rows["torch-zero"]["largest"]["bucket_bytes"] is None
    assert "largest" not in rows["deepspeed"]


def test_a_broken_peer_is_left_out_but_a_broken_reference_is_an_error() -> None:
    contest = Contest(Job("sharded", ("mlp",), ALL, 2, 1.0), "mlp")
    contest.drop(FIELD["fairscale"].variant, "it broke")
    assert contest.left_out == {"fairscale": "it broke"}
    for name in ("torchddp-auto", "torchddp-ddp", REFERENCE):
        with pytest.raises(WrongTrainingError, match=f"'{name}' on model 'mlp': it broke"):
            contest.drop(FIELD[name].variant, "it broke")


def test_training_errors_are_relative_to_the_change_by_training() -> None:
    start = [torch.zeros(4), torch.ones(2)]
    want = [torch.full((4,), 0.003), torch.ones(2) * 1.001]
    assert error_of(want, want, start) == 0
    assert error_of(start, want, start) == pytest.approx(1)  # it never stepped
    assert error_of([want[0], want[1] * 1.0001], want, start) > TOLERANCE  # although close in absolute terms
    assert error_of([want[0] * 0.994, want[1]], want, start) > TOLERANCE  # an error as large as clipping's
    assert error_of([want[0] * torch.nan, want[1]], want, start) == float("inf")
