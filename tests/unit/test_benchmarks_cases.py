"""Benchmark cases: the arithmetic of their results, and one launch of each case."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.unit import benchmark_models
from tests.unit.benchmark_results import ROUNDS, by_name, overlap, scaling, startup, step_time
from torchddp.bench import cli
from torchddp.bench.cases import MIN_ROUNDS, BenchCase, Settings
from torchddp.bench.overlap import Replay, hidden_share, hidden_text
from torchddp.bench.registry import CASES
from torchddp.bench.step_time import TrainingRunner
from torchddp.harness.variants import LOCAL, TORCH_DDP

OWN = benchmark_models.__name__


def test_results_of_step_time_overlap_startup_and_scaling() -> None:
    result = step_time()
    rows = by_name(result["variants"])
    assert result["best_torch"] == "torch tuned, cap 25" and result["rounds"] == ROUNDS
    assert rows["torchddp default"]["ratio_to_best_torch"]["median"] == 0.75
    assert rows["no DDP"]["ratio_to_best_torch"]["median"] == 0.625
    assert rows["torch tuned, cap 25"]["ratio_to_best_torch"] is None
    rows = by_name(overlap()["variants"])
    assert "hidden" not in rows["no DDP"]
    default = rows["torch default"]  # adds 4 ms to a step, and 5 ms to a step without computation
    assert (default["exposed_ms"]["median"], default["comm_ms"]["median"]) == (4.0, 5.0)
    assert default["hidden"]["median"] == pytest.approx(0.2)
    assert rows["torch tuned, cap 25"]["hidden"]["median"] == pytest.approx(0.75)
    assert rows["torchddp default"]["hidden"]["median"] == pytest.approx(0.75)
    result = startup()
    rows = by_name(result["variants"])
    assert [rows[name]["total_ms"]["median"] for name in rows] == [10, 60, 60, 20]
    assert rows["torchddp default"]["constructor_ms"]["median"] == 5
    assert rows["torchddp default"]["first_step_ms"]["median"] == 10
    assert rows["torchddp default"]["ratio_to_best_torch"]["median"] == pytest.approx(1 / 3)
    result = scaling()
    assert [size["world_size"] for size in result["sizes"]] == [1, 2, 4]
    assert [size["oversubscribed"] for size in result["sizes"]] == [False, False, True]
    ours = [by_name(size["variants"])["torchddp default"] for size in result["sizes"]]
    assert [row["efficiency"] for row in ours] == pytest.approx([1.0, 10 / 12, 10 / 24])
    assert ours[2]["ratio_to_best_torch"]["median"] == pytest.approx(24 / 40)


def test_a_share_out_of_range_is_stored_but_clamped_in_the_table() -> None:
    share = hidden_share(np.array([3.0, 3.0, -1.0]), np.array([2.0, 2.0, 2.0]))
    assert (share["median"], share["q75"]) == (-0.5, 1.5)
    assert hidden_text(share) == "0% [0%..100%]"
    constant = hidden_share(np.full(9, 3.0), np.full(9, 4.0))
    assert {constant[key] for key in ("median", "q25", "q75", "ci95_low", "ci95_high")} == {0.25}
    nothing = hidden_share(np.array([1.0, 1.0]), np.array([0.0, -1.0]))
    assert nothing["median"] is None and nothing["odd_rounds"] == 2
    assert hidden_text(nothing).startswith("? [")


def test_a_training_step_updates_no_weight() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    before = [p.clone() for p in module.parameters()]
    runner = TrainingRunner(LOCAL, module, lambda output: output.square().mean())
    assert runner.step(torch.ones(2, 4)) > 0
    assert all(gradient.abs().max() > 0 for _, gradient in runner.gradients())
    assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


def test_a_replay_returns_copies_of_the_recorded_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model(torch.randn(5, 4)).square().mean().backward()
    recorded = [p.grad for p in model.parameters()]
    replay = Replay(model, [gradient for gradient in recorded if gradient is not None])
    for _ in range(2):
        for parameter in replay.parameters():
            parameter.grad = None
        replay().backward()
        for parameter, gradient in zip(replay.parameters(), recorded, strict=True):
            assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
            assert parameter.grad.data_ptr() != gradient.data_ptr()  # type: ignore[union-attr]
    assert [b.shape for b in replay.buffers()] == [b.shape for b in model.buffers()]


def settings(**changed: Any) -> Settings:
    unset = dict.fromkeys(("cases", "models", "peers"), ())
    unset |= dict.fromkeys(("seconds", "world_size", "caps_mb")) | dict.fromkeys(("ours_tuned", "quick"), False)
    return Settings(**{**unset, "ours": TORCH_DDP, "seed": 0, **changed})


def test_options_default_to_those_of_the_case() -> None:
    step, memory = CASES["step_time"], CASES["memory"]

    def tuned(case: BenchCase, **changed: Any) -> list[str]:
        names = [variant.name for variant in settings(**changed).variants_of(case)]
        return [name.removeprefix("torch tuned, cap ") for name in names if "tuned" in name]

    assert tuned(step, quick=True) == ["1", "25"]
    assert tuned(step, caps_mb=(7.0,)) == ["7"]
    assert tuned(memory, caps_mb=(7.0,)) == ["25"]
    assert settings(seconds=3.0, quick=True).seconds_of(step) == 3.0
    assert settings(quick=True).models_of(step) == ("mlp",)
    assert settings(models=("conv", "a:b")).models_of(memory) == ("conv", "a:b")


@pytest.mark.rest_is_thorough("arguments0-*")
@pytest.mark.parametrize(
    ("arguments", "model", "times"),
    [
        (["--case", "per_param"], "small", ["step_ms"]),
        (["--case", "step_time"], f"{OWN}:with_tuple", ["step_ms"]),
        (["--case", "overlap"], "conv", ["step_ms", "replay_ms"]),
        (["--case", "startup"], f"{OWN}:with_dict", ["first_step_ms", "second_step_ms", "total_ms"]),
        (["--case", "memory", "--world-size", "1"], f"{OWN}:with_tuple", []),
    ],
)
def test_a_case_saves_its_measurements(arguments, model, times, tmp_path, capsys):
    path = tmp_path / "result.json"
    brief = ["--model", model, "--seconds", "0.1", "--caps", "25", "--quick", "--json", str(path)]
    assert cli.main([*arguments, *brief]) == 0
    assert "torchddp default" in capsys.readouterr().out
    saved = json.loads(path.read_text())
    (result,) = saved["results"]
    assert (result["case"], result["model"]) == (arguments[1], model)
    assert not model.startswith(OWN) or (result["title"], result["parameters"]) == (model, 6)
    assert not times or result["rounds"] >= MIN_ROUNDS
    assert [row["role"] for row in result["variants"]] == ["local", "torch", "torch", "ours"]
    assert all(row[key]["median"] > 0 for row in result["variants"] for key in times)
    assert saved["machine"]["torch"] and saved["command"].startswith("python -m benchmarks --case")


@pytest.mark.thorough
def test_scaling_launches_each_world_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    arguments = "--case scaling --set world_sizes=2,1 --model conv --seconds 0.2 --json".split()
    assert cli.main([*arguments, str(path), "--ours", TORCH_DDP]) == 0
    assert "scaling · batch-norm conv net" in capsys.readouterr().out
    alone, two = json.loads(path.read_text())["results"][0]["sizes"]
    assert (alone["world_size"], two["world_size"]) == (1, 2)
    assert all(row["efficiency"] == 1 for row in alone["variants"])
    assert all(0 < row["efficiency"] < 3 for row in two["variants"])
