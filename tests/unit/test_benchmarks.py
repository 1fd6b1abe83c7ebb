"""`torchddp bench`: statistics, cases, models, reports and errors."""

import json
import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import __main__ as developers
from tests.harness import each
from tests.unit import benchmark_models
from tests.unit.helpers import assert_refused, printed
from torchddp.bench import cli, gradients, memory, report, timing
from torchddp.bench.cases import DEFAULT_CASES, MIN_ROUNDS, BenchCase, Settings, one_launch
from torchddp.bench.registry import CASES, USERS_CASES
from torchddp.bench.report import save_results
from torchddp.bench.step_time import step_time_result
from torchddp.harness import models, stats
from torchddp.harness.launch import EXIT_BAD_ARGUMENT, LaunchError
from torchddp.harness.machine import describe_machine
from torchddp.harness.model_names import MODEL_NAMES
from torchddp.harness.models import MODELS, load_factory, make_batch, make_model, prove, run_forward
from torchddp.harness.tables import interval_text, ratio_sign, ratio_text
from torchddp.harness.variants import TORCH_DDP, ArgumentError, Variant, make_variants

TORCH = ["--ours", TORCH_DDP]
OWN = benchmark_models.__name__

# Made-up times without noise.
VARIANTS = make_variants("torchddp.DistributedDataParallel", [], (25,))
MODEL = {"model": "mlp", "title": "MLP", "parameters": 12, "gradient_bytes": 25_000_000}
ROUNDS = 10


def constant(*values_ms: float) -> np.ndarray:
    """Times [variant, round] without noise for no DDP, torch default, torch tuned and ours."""
    return np.array(values_ms)[:, None] + np.zeros((1, ROUNDS))


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in rows}


def step_time() -> dict[str, Any]:
    return step_time_result(CASES["step_time"], VARIANTS, {**MODEL, "step_ms": constant(10, 20, 16, 12)}, 2)


def document(*results: dict[str, Any], quick: bool = False) -> dict[str, Any]:
    head = {"date": "2030-01-02T03:04:05+00:00", "command": "torchddp bench", "machine": describe_machine()}
    return {**head, "settings": {"quick": quick}, "results": list(results)}


def test_summaries_and_ratios_are_of_paired_rounds() -> None:
    summary = stats.summarize([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (summary["median"], summary["q25"], summary["q75"]) == (3.0, 2.0, 4.0)
    assert summary["p90"] == pytest.approx(4.6)
    few, many = (stats.median_interval(np.linspace(0, 1, count)) for count in (16, 1600))
    assert many[1] - many[0] < (few[1] - few[0]) / 5
    # The machine slows down tenfold; only a per-round ratio shows that ours always takes half the time.
    theirs = np.array([1.0, 1.0, 1.0, 10.0, 10.0, 10.0])
    assert stats.paired_ratio(theirs / 2, theirs) == stats.PairedRatio(*[0.5] * 5, rounds=6, odd_rounds=0)
    # The median of what five values are drawn from lies outside of them more often than in 5%.
    assert stats.median_interval(np.ones(5)) == (-math.inf, math.inf)
    ratio = stats.paired_ratio([1.0, 1.0, 3.0, -2.0, 1.0], [2.0, 2.0, -1.0, 0.0, 2.0])
    assert (ratio.median, ratio.odd_rounds) == (0.5, 2)
    mostly_noise = stats.paired_ratio([1.0, 1.0, 1.0], [0.0, -1.0, 2.0])
    assert math.isinf(mostly_noise.median) and mostly_noise.to_dict()["median"] is None


def field() -> tuple[Variant, ...]:
    return make_variants("torchddp.DistributedDataParallel", ["a.b.C", "a.d.C"], (1, 25))


def fake_result(case: str = "exposed", ours_ms: float = 2.0) -> dict[str, Any]:
    """Local 10 ms; torch default +4, cap 1 +2.5, cap 25 +3; ours + `ours_ms`; peers +8."""
    added_ms = np.array([0.0, 4.0, 2.5, 3.0, ours_ms, 8.0, 8.0])
    step_ms = 10.0 + added_ms[:, None] + np.zeros((1, 40))
    raw = {"model": "small", "title": "1000 small tensors", "parameters": 1000, "gradient_bytes": 256000}
    return gradients.timed_result(CASES[case], field(), {**raw, "step_ms": step_ms}, world_size=2)


def test_users_see_what_they_can_act_on() -> None:
    memory_row = {
        "peak_rss_bytes": 1,
        "peak_shared_once_bytes": 1,
        "grad_storage_bytes": 1,
        "extra_gradient_copies": 1.0,
    }
    roles = (("torch", 30_000_000), ("torch", 20_000_000), ("ours", 10_000_000))
    rows = [{"name": role, "role": role, "extra_bytes": count, **memory_row} for role, count in roles]
    results = fake_result(), fake_result("per_param"), step_time(), {**MODEL, "case": "memory", "variants": rows}
    text = printed(report.render(document(*results), developer=False), 80)
    for words in (
        r"exposed +small +2\.00 ms +2\.50 ms +0\.80 \[0\.80\.\.0\.80\] +█{8} *$",
        r"per_param +small +2\.00 us/param +2\.50 us/param +0\.80",
        r"step_time +mlp +12\.0 ms +16\.0 ms +0\.75 \[0\.75\.\.0\.75\] +█{8} *$",
        r"memory +mlp +10 MB +20 MB +0\.50 +█{5} *$",
        r"torchddp is faster than torch's best in all 3 comparisons\.\s+Peak\s+memory\s+that\s+torchddp\s+adds:",
    ):
        assert re.search(words, text, re.MULTILINE), (words, text)
    assert "tuned, cap" not in text and "tuned:" not in text


def test_a_ratio_that_noise_hides_is_too_noisy_and_counts_for_nobody() -> None:
    hidden = stats.paired_ratio([1.0, 1.0, 1.0], [0.0, -1.0, 2.0]).to_dict()
    assert ratio_text(hidden).plain == "too noisy" and ratio_sign(hidden) == 0
    negative = {**stats.paired_ratio([1.0], [2.0]).to_dict(), "q25": -0.7}
    assert ratio_text(negative).plain == "too noisy" and ratio_sign(negative) == 0
    assert interval_text(hidden) == "95% interval unknown"
    result = step_time()
    by_name(result["variants"])["torchddp default"]["ratio_to_best_torch"] = hidden
    assert report.verdict(document(result)) == (
        "Too noisy to tell whether torchddp is faster than torch's best. Run longer (--seconds) on an idle machine."
    )
    others = document(step_time(), result) | {"settings": {"quick": False, "ours": "a.b.C"}}
    assert report.verdict(others).startswith("The class under test against torch's best, in 2 comparisons: faster in 1")
    others["results"].pop()
    assert report.verdict(others) == "The class under test is faster than torch's best."


def test_models_measured_before_a_failure_are_in_the_results() -> None:
    kept: dict[str, Any] = {**MODEL, "step_ms": constant(10, 20, 16, 12)}
    settings = Settings((), ("mlp", "gpt"), 1.0, 2, (25,), "torchddp.DistributedDataParallel", (), False, False, 0)
    launched = mock.Mock(side_effect=LaunchError("silent", [kept]))
    with mock.patch.object(BenchCase, "launch", launched):
        found = one_launch(step_time_result, CASES["step_time"], settings, mock.Mock())
        assert next(found) == step_time()
        with pytest.raises(LaunchError, match="silent"):
            next(found)
    measured = {**MODEL, **dict.fromkeys(memory._KEYS, 8), "method": "VmHWM"}
    case = CASES["memory"]
    launches = [[measured]] * len(settings.variants_of(case))  # of the first model
    with mock.patch.object(BenchCase, "launch", mock.Mock(side_effect=[*launches, LaunchError("silent")])):
        found = iter(case.run(case, settings, mock.Mock()))
        assert next(found)["model"] == "mlp"
        with pytest.raises(LaunchError, match="silent"):
            next(found)


def test_a_report_is_printed_although_its_file_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    kept = {**MODEL, "step_ms": constant(10, 20, 16, 12)}
    with mock.patch.object(BenchCase, "launch", mock.Mock(side_effect=LaunchError("silent", [kept]))):
        code = developers.main(["--case", "step_time", "--model", "mlp", "--caps", "25", "--json", "/dev/full"])
    told = capsys.readouterr()
    assert code == EXIT_BAD_ARGUMENT and "torchddp default" in told.out
    assert told.err == "error: silent; cannot write to '/dev/full': No space left on device\n"


def test_saved_results_are_split_by_case_and_read_back(tmp_path: Path) -> None:
    save_results(document(fake_result(), fake_result("per_param")), tmp_path / "new")
    written = sorted((tmp_path / "new").iterdir())
    names = [path.name for path in written]
    assert [path.suffix for path in written] == [".json", ".png"] * 2
    assert names[0].startswith("2030-01-02-exposed-") and names[2].startswith("2030-01-02-per_param-")
    saved = json.loads(written[0].read_text())
    assert [entry["case"] for entry in saved["results"]] == ["exposed"]
    assert {"cpu", "cores", "torch", "torchddp", "git_commit"} <= saved["machine"].keys()
    assert written[1].read_bytes().startswith(b"\x89PNG")


def test_a_wrong_argument_is_refused_in_one_sentence(capsys, monkeypatch):
    for arguments, words in (
        (["--case", "nope"], "There is no case 'nope'; choose from step_time, exposed, memory, per_param, "),
        (
            ["--case", "memory", "--set", "op=broadcast"],
            "--set op=broadcast: must be NAME=VALUE with an option of memory",
        ),
        (["--model", "nope"], "There is no model 'nope'; choose from small, mlp, gpt, conv, gpt2, or"),
        (["--seconds", "nan"], "above 0 and at most 3600, not nan."),
        (["--world-size", "0"], "--world-size must be 1 to 64, not 0."),
        (["--caps", "1,x"], "each of --caps, like 1,5,25, must be a positive number of MiB, not 'x'."),
        (["--caps", "0,5"], "must be a positive number of MiB, not '0'."),
        ([*TORCH, "--vs", "nodots"], "'nodots' is not a dotted path to a class"),
        ([*TORCH, "--vs", "no_such_package.Thing"], "Cannot import 'no_such_package'"),
        ([*TORCH, "--vs", "torch.nn.functional.relu"], "has no class named 'relu'."),
        (["--json", "/no/such/folder/x.json"], "--json: the folder '/no/such/folder' does not exist."),
        (["--out", "/etc/passwd"], "--out must be a folder"),
        (["--bogus"], "No such option: --bogus"),
    ):
        assert_refused(developers.main, arguments, words, capsys)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert_refused(developers.main, ["--quick"], "starts its own ranks (--world-size): run it without torchrun", capsys)


@pytest.mark.slow
def test_wrong_gradients_end_the_run_and_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks get different batches even from a model with a fixed batch, or the check could not fail."""
    arguments = ["--case", "per_param", "--model", f"{OWN}:with_tuple", "--vs", f"{OWN}.NotAveraging"]
    assert developers.main([*arguments, *TORCH, "--seconds", "0.1", "--world-size", "2"]) == 1
    captured = capsys.readouterr()
    assert "WrongGradientsError" in captured.err and "NotAveraging' on model" in captured.err
    assert "parameter 'left.weight'" in captured.err
    assert "torch default" not in captured.out


def test_gradients_may_be_empty_or_differ_by_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(timing.dist, "get_rank", lambda: 0)

    def compare(got: float, dtype: torch.dtype) -> None:
        want = torch.tensor([1.0, -2.0], dtype=dtype)
        timing._compare(field()[1], "mlp", "weight", want, want * got, timing.RELATIVE_TOLERANCE)

    compare(1.01, torch.bfloat16)
    for got, dtype in ((1.01, torch.float32), (1.5, torch.bfloat16), (math.nan, torch.bfloat16)):
        with pytest.raises(timing.WrongGradientsError, match="'weight': off by"):
            compare(got, dtype)
    timing._compare(field()[1], "mlp", "none", torch.empty(0, 4), torch.empty(0, 4), timing.RELATIVE_TOLERANCE)


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
    assert developers.main([*arguments, *brief]) == 0
    assert "torchddp default" in capsys.readouterr().out
    saved = json.loads(path.read_text())
    (result,) = saved["results"]
    assert (result["case"], result["model"]) == (arguments[1], model)
    assert not model.startswith(OWN) or (result["title"], result["parameters"]) == (model, 6)
    assert not times or result["rounds"] >= MIN_ROUNDS
    assert [row["role"] for row in result["variants"]] == ["local", "torch", "torch", "ours"]
    assert all(row[key]["median"] > 0 for row in result["variants"] for key in times)
    assert saved["machine"]["torch"] and saved["command"].startswith("python -m benchmarks --case")


def test_names_known_without_torch_match_the_cases_and_models() -> None:
    assert set(DEFAULT_CASES) <= set(USERS_CASES)
    assert re.findall(r"^  (\w+)  ", cli.HELP, re.MULTILINE) == list(USERS_CASES)
    assert tuple(MODELS) == MODEL_NAMES
    assert all(
        set(case.models) | set(case.quick_models) <= MODELS.keys() for case in (CASES[name] for name in USERS_CASES)
    )


@pytest.mark.parametrize("factory", ["with_tuple", "with_dict", "with_generator"])
def test_tuple_dict_and_generated_batches_reach_the_module(factory: str) -> None:
    name = f"{OWN}:{factory}"
    spec, model = load_factory(name, 0), make_model(name, 0)
    loss = spec.loss(run_forward(model, make_batch(name, 0, rank=0, index=0)))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.zero_grad(set_to_none=True)
    assert spec.batches_differ is (factory == "with_generator")
    if spec.batches_differ:
        assert not torch.equal(make_batch(name, 0, rank=0, index=0), make_batch(name, 0, rank=1, index=0))


class Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output.sum()


LINEAR, BATCH = nn.Linear(8, 2), torch.ones(4, 8)
NO_TENSOR = nn.Linear(8, 2)
NO_TENSOR.register_forward_hook(lambda *_: "text")


def test_an_invalid_model_is_reported_in_one_sentence(monkeypatch):
    cases = (
        (7, "the factory returned an int; it must return (module, batch)"),
        ((nn.Linear, BATCH), "the factory returned a tuple (type, Tensor); it must return (module, batch)"),
        ((LINEAR, 3), "the factory's batch is an int; it must return (module, batch)"),
        ((LINEAR, BATCH, 3), "the factory's loss is an int; it must return (module, batch)"),
        ((nn.Flatten(), BATCH), "no parameter of the module requires a gradient."),
        ((LINEAR, torch.ones(4, 9)), "forward raised RuntimeError: mat1 and mat2"),
        ((LINEAR, (BATCH, BATCH)), "3 were given; a batch holds only the module's arguments: use labels in the loss."),
        ((LINEAR, BATCH, nn.MSELoss()), "argument: 'target'; the loss gets only the module's output."),
        ((NO_TENSOR, BATCH), "raised TypeError: found no tensor to differentiate in the model's output, a str"),
        (
            (LINEAR, BATCH, lambda output: output),
            "the loss must be a scalar tensor that requires a gradient, not one of shape [",
        ),
        ((LINEAR, BATCH, Undifferentiable.apply), "backward raised NotImplementedError: "),
        ((nn.Embedding(4, 2, sparse=True), torch.tensor([1])), "parameter 'weight' has a sparse gradient, which "),
    )
    for made, words in each(cases):
        monkeypatch.setattr(models.dist, "get_rank", lambda: 0)
        monkeypatch.setattr(benchmark_models, "seeded", lambda made=made: made, raising=False)
        load_factory.cache_clear()
        with pytest.raises(ArgumentError) as caught:
            prove(f"{OWN}:seeded", 0)
        message = str(caught.value)
        assert message.startswith(f"--model {OWN}:seeded: ") and "\n" not in message and words in message
    cases = (
        ("no_such_package:x", "cannot import 'no_such_package'"),
        (f"{OWN}:missing", "has no function or class named 'missing'"),
    )
    for model, words in each(cases):
        with pytest.raises(ArgumentError, match=f"^--model {model}: .*{words}"):
            prove(model, 0)
