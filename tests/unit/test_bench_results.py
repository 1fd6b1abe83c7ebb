"""Results of developers' cases, from made-up times and memory."""

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.cases import checks, sharded, torchft
from benchmarks.cases.sharded import REFERENCE, TOLERANCE, VARIANTS, Contest, WrongTrainingError, error_of
from tests.unit.benchmark_results import MODEL, by_name
from tests.unit.helpers import printed
from torchddp.bench.cases import Job


def test_checks_are_compared_with_the_plain_step_of_their_round() -> None:
    step_ms = np.array([[8.0] * 3, [10.0] * 3, [10.0] * 3, [14.0] * 3, [10.1] * 3, [11.0] * 3, *[[10.0] * 3] * 2])
    result = checks.checks_result(checks.VARIANTS, {**MODEL, "step_ms": step_ms}, 2)
    ratios = {row["name"]: row["to_plain"] for row in result["variants"]}
    assert ratios["no DDP"] is None and ratios["plain"] is None
    assert ratios["find_nonfinite=True"]["median"] == pytest.approx(1.01)
    assert "1.40 [" in printed(checks.table(result))


def test_sharded_steps_are_compared_with_torchs_fastest() -> None:
    steps = {"torch-ddp": 90.0, "torch-zero": 80.0, "deepspeed": 100.0, "torchddp-auto": 36.0}
    raw = {**MODEL, "left_out": {"fairscale": "fairscale is not installed"}}
    result = sharded.time_result({**raw, "step_ms": {name: np.full(40, ms) for name, ms in steps.items()}}, 2)
    assert result["best_torch"] == "torch-zero"
    assert by_name(result["variants"])["torchddp-auto"]["ratio_to_best_torch"]["median"] == pytest.approx(0.45)
    text = printed(sharded.time_table(result))
    assert "fairscale is left out: fairscale is not installed" in text and "0.45 [" in text


def test_memory_is_that_of_the_largest_rank() -> None:
    rank = dict.fromkeys(sharded.MEMORY_KEYS, 50_000_000)
    larger = dict.fromkeys(sharded.MEMORY_KEYS, 100_000_000)
    raws: dict[str, dict[str, Any]] = {
        REFERENCE: {**MODEL, "left_out": None, "ranks": [rank, larger]},
        "deepspeed": {**MODEL, "left_out": "deepspeed is not installed", "ranks": []},
    }
    result = sharded.memory_result(raws, 2)
    (row,) = result["variants"]
    assert {key: row[key] for key in sharded.MEMORY_KEYS} == larger
    text = printed(sharded.memory_table(result))
    assert "deepspeed is left out: deepspeed is not installed" in text and " 100.0 " in text


def test_a_broken_peer_is_left_out_but_a_broken_reference_is_an_error() -> None:
    contest = Contest(Job("sharded", ("mlp",), tuple(VARIANTS.values()), 2, 1.0), "mlp")
    contest.drop("fairscale", "it broke")
    assert contest.left_out == {"fairscale": "it broke"}
    for name in ("torchddp-auto", "torchddp-ddp", REFERENCE):
        with pytest.raises(WrongTrainingError, match=f"'{name}' on model 'mlp': it broke"):
            contest.drop(name, "it broke")


def test_training_errors_are_relative_to_the_change_by_training() -> None:
    start = [torch.zeros(4), torch.ones(2)]
    want = [torch.full((4,), 0.003), torch.ones(2) * 1.001]
    assert error_of(want, want, start) == 0
    assert error_of(start, want, start) == pytest.approx(1)  # it never stepped
    assert error_of([want[0], want[1] * 1.0001], want, start) > TOLERANCE  # although close in absolute terms
    assert error_of([want[0] * 0.994, want[1]], want, start) > TOLERANCE  # an error as large as clipping's
    assert error_of([want[0] * torch.nan, want[1]], want, start) == float("inf")


def test_steps_under_torchft_are_compared_with_torchfts_class() -> None:
    variants = torchft.field((4.0,))
    step_ms = np.array([[100.0] * 9, [75.0] * 9, [80.0] * 9])
    result = torchft.torchft_result(variants, {**MODEL, "step_ms": step_ms}, 2)
    ratios = [row["ratio_to_best_torch"] for row in result["variants"]]
    assert ratios[0] is None and [ratio["median"] for ratio in ratios[1:]] == [0.75, 0.8]
    assert "torchddp, cap 4" in printed(torchft.table(result))
