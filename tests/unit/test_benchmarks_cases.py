"""Benchmark cases: the arithmetic of their results, and one launch of each case."""

import json
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit import benchmark_models
from tests.unit.benchmark_results import ROUNDS, by_name, step_time
from torchddp.bench import cli
from torchddp.bench.cases import MIN_ROUNDS, BenchCase, Settings
from torchddp.bench.registry import CASES
from torchddp.bench.step_time import TrainingRunner
from torchddp.harness.variants import LOCAL, TORCH_DDP

OWN = benchmark_models.__name__


def test_ratios_of_whole_steps_are_to_torchs_best_row() -> None:
    result = step_time()
    rows = by_name(result["variants"])
    assert result["best_torch"] == "torch tuned, cap 25" and result["rounds"] == ROUNDS
    assert rows["torchddp default"]["ratio_to_best_torch"]["median"] == 0.75
    assert rows["no DDP"]["ratio_to_best_torch"]["median"] == 0.625
    assert rows["torch tuned, cap 25"]["ratio_to_best_torch"] is None


def test_a_training_step_updates_no_weight() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    before = [p.clone() for p in module.parameters()]
    runner = TrainingRunner(LOCAL, module, lambda output: output.square().mean())
    assert runner.step(torch.ones(2, 4)) > 0
    assert all(gradient.abs().max() > 0 for _, gradient in runner.gradients())
    assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


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
        (["--case", "exposed"], "conv", ["step_ms"]),
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
