"""Results of the programs in benchmarks/: ratios, bounds and predictions from made-up times and curves."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.checks import field
from benchmarks.checks.results import model_result
from benchmarks.convergence import bounds
from benchmarks.convergence.results import task_result
from benchmarks.links.field import LOCALHOST, PLANNED, make_field
from benchmarks.links.results import PAYLOAD_SHARE, place_result, predictions
from benchmarks.sharded.bounds import comparisons_of
from benchmarks.sharded.field import FIELD, REFERENCE, choose_variants
from benchmarks.sharded.measure import Contest, WrongTrainingError
from benchmarks.sharded.proof import TOLERANCE, error_of
from benchmarks.sharded.report import render
from benchmarks.sharded.results import MEMORY_KEYS, memory_result, speed_result
from benchmarks.slow_link.bounds import COMPARISONS, NAMES, judge
from benchmarks.slow_link.curves import Point, arrival, smoothed, target_of
from benchmarks.slow_link.job import TARGET_METHOD
from benchmarks.slow_link.results import race_result
from benchmarks.training.methods import METHODS
from benchmarks.training.tasks import TASKS
from tests.simulated import make_profile, with_host
from tests.unit import benchmark_results
from tests.unit.benchmark_results import MODEL, by_name
from tests.unit.helpers import printed
from torchddp.bench.cases import Job
from torchddp.plan.step_profile import LinearCost


def test_the_cost_of_a_check_is_spread_over_its_interval() -> None:
    step_ms = np.array([[8.0] * 3, [10.0] * 3, [10.0] * 3, [14.0] * 3, [10.1] * 3, [11.0] * 3, *[[10.0] * 3] * 2])
    raw = {"model": "mlp", "title": "MLP", "parameters": 12, "gradient_bytes": 10**6, "step_ms": step_ms}
    result = model_result(raw, field.make_field(), 2, 100)
    assert result["check_ms"]["median"] == pytest.approx(4.0)
    assert result["check_share"] == pytest.approx(0.004)
    ratios = {row["name"]: row["to_plain"] for row in result["variants"]}
    assert ratios["no DDP"] is None and ratios["plain"] is None
    assert ratios["find_nonfinite=True"]["median"] == pytest.approx(1.01)


MBIT, GBIT = 10**6, 10**9
VARIANTS = make_field((1, 25))


def result_of(place: str, step_ms: dict[str, float]) -> dict[str, Any]:
    """A result from steps without noise."""
    steps = np.array([[step_ms.get(variant.name, 50.0)] * 9 for variant in VARIANTS])
    raw = {**MODEL, "transport": "c10d", "planned_bytes": [], "profile": make_profile(), "step_ms": steps}
    return place_result(place, VARIANTS, raw)


def test_planned_buckets_are_compared_with_the_best_of_the_sweep() -> None:
    assert VARIANTS[-1].name == PLANNED
    result = result_of("1 Gbit/s", {PLANNED: 40.0, "torchddp, cap 1": 44.0, "torch default": 80.0})
    assert result["best_of_sweep"] == "torchddp, cap 1"
    assert result["planned_to_best"]["median"] == pytest.approx(40 / 44)
    assert result["planned_to_torch_default"]["median"] == pytest.approx(0.5)
    assert result["ours_ms"] == 50.0


def test_each_link_is_predicted_from_the_others() -> None:
    profiles, results = {}, []
    for place, rate in (("1 Gbit/s", GBIT), ("100 Mbit/s", 100 * MBIT), (LOCALHOST, None)):
        profile = make_profile(device="cpu", cost=LinearCost(0.0, 1e-9 if rate is None else 8 / rate / PAYLOAD_SHARE))
        profiles[place, MODEL["model"]] = with_host(profile, 1e-10)
        results.append({**result_of(place, {}), "ours_ms": 100.0})
    rows = predictions(results, profiles, {"1 Gbit/s": GBIT, "100 Mbit/s": 100 * MBIT})
    ways = [("100 Mbit/s", "1 Gbit/s"), ("1 Gbit/s", "100 Mbit/s")]
    assert [(row["recorded_over"], row["predicted_for"]) for row in rows] == ways
    fast, slow = (row["predicted_ms"] for row in rows)
    assert slow > 5 * fast
    assert rows[0]["error"] == pytest.approx(fast / 100.0 - 1)


def run_of(seed: int, loss: float) -> dict[str, Any]:
    """A curve of three evaluations."""
    return {"seed": seed, "curve": [[0, 5.0, 0], [50, 3.0, 5e5], [100, loss, 1e6]]}


def rows_of(losses: dict[str, list[float]], errors: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
    runs = {name: [run_of(seed, loss) for seed, loss in enumerate(values)] for name, values in losses.items()}
    for name, text in (errors or {}).items():
        runs[name] = [{"seed": seed, "error": text} for seed in range(2)]
    told = {"task": "gpt", "title": "GPT", "unit": "tokens", "units_per_step": 1024, "steps": 100, "parameters": 9}
    whats = {name: METHODS[name].what for name in bounds.NAMES}
    return by_name(task_result({**told, "runs": runs}, whats)["methods"])


def test_ratios_are_per_seed_and_bounds_apply_to_their_mean() -> None:
    row = rows_of({bounds.REFERENCE: [2.0, 4.0], "int8": [2.2, 3.6]})["int8"]
    assert row["ratio"] == pytest.approx({"mean": 1.0, "low": 0.9, "high": 1.1})
    assert row["loss"] == pytest.approx(2.9) and row["bytes_per_step"] == 1e4
    assert row["holds"] is True
    assert row["curve"][-1] == {"units": 102_400, "loss": pytest.approx(2.9), "bytes": 1e6}
    for ratio, holds in ((1.0099, True), (1.0101, False)):
        row = rows_of({bounds.REFERENCE: [2.0, 4.0], "int8": [2.0 * ratio, 4.0 * ratio]})["int8"]
        assert row["holds"] is holds, ratio


def test_without_a_finite_loss_or_a_reference_no_bound_is_met() -> None:
    losses = {bounds.REFERENCE: [2.0, 4.0], "int8": [2.0, math.nan], "int4": [2.0, math.inf]}
    rows = rows_of(losses, {"fp16": "ImportError: no comm_hooks"})
    assert rows["fp16"]["holds"] is False and "comm_hooks" in rows["fp16"]["error"]
    assert rows["int8"]["holds"] is False and rows["int8"]["error"] == "loss is not finite, seed 1"
    assert rows["int4"]["holds"] is None
    row = rows_of({"int8": [2.0, 4.0]}, {bounds.REFERENCE: "RuntimeError: gone"})["int8"]
    assert row["ratio"] is None and row["holds"] is None


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_task_is_a_function_of_seed_step_and_rank(name: str) -> None:
    if name == "digits":
        pytest.importorskip("sklearn")
    task, again = TASKS[name](), TASKS[name]()
    inputs, targets = task.batch(3, 5, 1, 2)
    assert all(map(torch.equal, (inputs, targets), again.batch(3, 5, 1, 2)))
    for other in ((4, 5, 1), (3, 6, 1), (3, 5, 0)):
        assert not torch.equal(inputs, task.batch(*other, 2)[0]), other
    first, second = task.make_model(1), again.make_model(1)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    # Two ranks' parts of the evaluation set have equal sizes, are disjoint, and cover the set.
    (whole,), parts = task.held_out(0, 1), [task.held_out(rank, 2)[0] for rank in range(2)]
    assert len(parts[0][0]) == len(parts[1][0]) == len(whole[0]) / 2
    both = [first(*part).item() for part in parts]
    assert both[0] != both[1] and sum(both) / 2 == pytest.approx(first(*whole).item(), rel=1e-5)


def curve(*losses: float, step_s: float = 1.0, slice_steps: int = 5) -> list[Point]:
    """A curve with an evaluation after each slice."""
    return [Point(i * slice_steps, i * slice_steps * step_s, loss) for i, loss in enumerate(losses)]


def test_the_time_to_a_loss_is_interpolated_between_smoothed_evaluations() -> None:
    falling = curve(6.0, 5.0, 4.0, 3.0, 2.0, step_s=2.0)
    assert [arrival(falling, loss) for loss in (4.0, 3.5, 6.0)] == [(10, 20), (12.5, 25), (0, 0)]
    assert target_of(falling) == 3.0
    # Only the last evaluation is at 2.0, which may be noise.
    assert arrival(curve(6.0, 5.0, 4.0, 3.0, 2.0), 2.5) is None
    assert arrival(curve(6.0, 5.0, 4.0, 3.0, 2.0, 1.0), 2.5) == (17.5, 17.5)
    lucky = curve(6.0, 5.0, 1.0, 5.0, 4.0, 3.0, 2.0)
    assert smoothed(lucky) == [6.0, 5.0, 5.0, 4.0, 4.0, 3.0]
    assert arrival(lucky, 3.5) == (22.5, 22.5)
    nan = float("nan")
    assert arrival(curve(6.0, nan, nan, nan, nan), 4.0) is None
    with pytest.raises(ValueError, match="needs 3 evaluations, got 2"):
        target_of(curve(6.0, 5.0))


def test_the_fastest_method_of_each_side_is_compared() -> None:
    seconds = {"torch-ddp": 130.0, "torch-ddp-5": 120.0, "powersgd": 20.0, "diloco": 10.0}
    (row,) = [row for row in judge(seconds, tuple(seconds)) if row["bound"] == 10.0]
    assert (row["ours"], row["theirs"], row["ratio"], row["holds"]) == ("diloco", "torch-ddp-5", 12.0, True)
    (row,) = [row for row in judge({**seconds, "diloco": 12.1}, tuple(seconds)) if row["bound"] == 10.0]
    assert row["holds"] is False
    # A method that didn't arrive misses its bound; one that didn't run is not judged.
    ran = ("torch-ddp", "exact", "torch-powersgd", "powersgd")
    rows = {row["title"]: row for row in judge({"torch-ddp": 100.0, "powersgd": 50.0}, ran)}
    assert rows["exact / torch DDP"]["holds"] is False and rows["exact / torch DDP"]["ratio"] is None
    # Theirs never arrived, so ours is not slower.
    assert rows["PowerSGD / torch's PowerSGD"]["holds"] is True
    assert "int8 / torch DDP" not in rows


def raced(missing: str = "") -> dict[str, Any]:
    """The result of a race in which all losses fall alike, with shorter steps for later methods."""
    methods: dict[str, Any] = {}
    for index, name in enumerate(NAMES):
        step_s = 2.0 / (index + 1)
        points = [[p.steps, p.seconds, p.loss] for p in curve(6.0, 5.0, 4.0, 3.0, 2.5, step_s=step_s)]
        methods[name] = {"points": points, "step_seconds": [step_s] * 4, "sent_bytes_per_step": [2e7, 1.9e7]}
    if missing:
        methods[missing] = {"error": "ImportError: cannot import name 'averaging' from 'torchddp'"}
    told = {"title": "GPT", "parameters": 9, "unit": "tokens", "units_per_step": 256, "steps": 15, "target": 3.0}
    return race_result({**told, "methods": methods}, {name: METHODS[name].what for name in NAMES})


def test_a_race_reports_each_methods_speedup_or_error() -> None:
    result = raced()
    rows = {row["name"]: row for row in result["methods"]}
    assert rows[TARGET_METHOD]["arrival"] == {"steps": 15.0, "seconds": 30.0}
    assert result["best_torch"] == "torch-ddp-5" and rows["torch-ddp-5"]["speedup"] == 1.0
    exact = NAMES.index("exact") + 1
    assert rows["exact"]["speedup"] == pytest.approx(exact / 2)
    assert {row["title"] for row in result["comparisons"]} == {comparison.title for comparison in COMPARISONS}
    result = raced("diloco")
    rows = {row["name"]: row for row in result["methods"]}
    assert "averaging" in rows["diloco"]["error"] and rows["diloco"]["arrival"] is None
    (row,) = [row for row in result["comparisons"] if "DiLoCo" in row["title"]]
    assert row["ours"] == "powersgd"


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
