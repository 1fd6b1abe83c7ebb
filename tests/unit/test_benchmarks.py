"""`torchddp bench`: statistics, reports and errors; no process outlives the command."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from tests.programs import ROOT
from tests.unit import benchmark_models
from tests.unit.benchmark_results import by_name, document, step_time
from tests.unit.helpers import assert_refused, is_running, printed, wait_until
from torchddp.bench import cli, gradients, report, timing
from torchddp.bench.cases import MAX_ROUNDS, MIN_ROUNDS
from torchddp.bench.memory import memory_result, parse_bytes
from torchddp.bench.registry import CASES, USERS_CASES, check_names
from torchddp.bench.report import save_results
from torchddp.harness import stats
from torchddp.harness.variants import TORCH_DDP, ArgumentError, Role, Variant, load_class, make_variants

TORCH = ["--ours", TORCH_DDP]


class Dying(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        os._exit(3)


def test_summaries_and_ratios_are_of_paired_rounds() -> None:
    summary = stats.summarize([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (summary["median"], summary["q25"], summary["q75"]) == (3.0, 2.0, 4.0)
    assert summary["p90"] == pytest.approx(4.6)
    few, many = (stats.median_interval(np.linspace(0, 1, count)) for count in (16, 1600))
    assert many[1] - many[0] < (few[1] - few[0]) / 5
    # The machine slows down tenfold; only a per-round ratio shows that ours always takes half the time.
    theirs = np.array([1.0, 1.0, 1.0, 10.0, 10.0])
    assert stats.paired_ratio(theirs / 2, theirs) == stats.PairedRatio(*[0.5] * 5, rounds=5, odd_rounds=0)
    ratio = stats.paired_ratio([1.0, 1.0, 3.0, -2.0, 1.0], [2.0, 2.0, -1.0, 0.0, 2.0])
    assert (ratio.median, ratio.odd_rounds) == (0.5, 2)
    mostly_noise = stats.paired_ratio([1.0, 1.0, 1.0], [0.0, -1.0, 2.0])
    assert math.isinf(mostly_noise.median) and mostly_noise.to_dict()["median"] is None


def test_the_number_of_rounds_follows_the_time_within_its_limits() -> None:
    enough = (100, 10.0), (MIN_ROUNDS, 99.0), (MAX_ROUNDS, 0.1)
    assert all(timing.enough(rounds, spent_s, seconds=10.0) for rounds, spent_s in enough)
    assert not timing.enough(100, 9.9, seconds=10.0) and not timing.enough(MIN_ROUNDS - 1, 99.0, seconds=10.0)
    cases = (10, 0.01), (100, 10.0), (MIN_ROUNDS - 1, 99.0), (MAX_ROUNDS, 0.1)
    decided = [timing.rounds_to_go(rounds, spent_s, seconds=10.0, decisions=8) for rounds, spent_s in cases]
    assert decided == [1250, 0, 1, 0]


def field() -> tuple[Variant, ...]:
    return make_variants("torchddp.DistributedDataParallel", ["a.b.C", "a.d.C"], (1, 25))


def test_the_field_has_torch_default_torch_tuned_torchddp_and_peers() -> None:
    variants = field()
    torchs = "torch default", "torch tuned, cap 1", "torch tuned, cap 25"
    assert [variant.name for variant in variants] == ["no DDP", *torchs, "torchddp default", "vs a.C", "vs a.C (2)"]
    tuned = dict.fromkeys(("gradient_as_bucket_view", "batched_grad_copy", "static_graph"), True)
    assert variants[3].keywords == {**tuned, "bucket_cap_mb": 25}
    variants = make_variants(TORCH_DDP, ["a.b.C"], (25,), extra={"find_unused_parameters": True})
    assert all(v.keywords["find_unused_parameters"] is True for v in variants if v.role is not Role.LOCAL)
    assert variants[0].keywords == {} and variants[2].keywords["bucket_cap_mb"] == 25


def fake_result(case: str = "exposed", ours_ms: float = 2.0) -> dict[str, Any]:
    """Local 10 ms; torch default +4, cap 1 +2.5, cap 25 +3; ours + `ours_ms`; peers +8."""
    added_ms = np.array([0.0, 4.0, 2.5, 3.0, ours_ms, 8.0, 8.0])
    step_ms = 10.0 + added_ms[:, None] + np.zeros((1, 40))
    raw = {"model": "small", "title": "1000 small tensors", "parameters": 1000, "gradient_bytes": 256000}
    return gradients.timed_result(CASES[case], field(), {**raw, "step_ms": step_ms}, world_size=2)


def test_ratios_are_to_torchs_fastest_row_and_costs_are_per_parameter() -> None:
    result = fake_result()
    rows = by_name(result["variants"])
    assert result["best_torch"] == "torch tuned, cap 1"
    assert rows["torchddp default"]["ratio_to_best_torch"]["median"] == pytest.approx(0.8)
    assert rows["torch tuned, cap 1"]["ratio_to_best_torch"] is None
    assert "cost" not in rows["no DDP"]
    result = fake_result("per_param")
    assert by_name(result["variants"])["torch default"]["cost"]["median"] == pytest.approx(4.0)  # 4 ms / 1000
    assert result["unit"] == "us/param"


def test_extra_memory_is_counted_in_copies_of_the_gradients() -> None:
    variants = (Variant("no DDP", Role.LOCAL), Variant("ours", Role.OURS, "a.B"))
    common = {"model": "mlp", "title": "MLP", "parameters": 12, "gradient_bytes": 20, "method": "x"}
    raws = [{**common, "peak_rss_bytes": peak, "grad_storage_bytes": 20} for peak in (100, 130)]
    result = memory_result(variants, raws, world_size=2)
    assert [entry["extra_bytes"] for entry in result["variants"]] == [0, 30]
    assert result["variants"][1]["extra_gradient_copies"] == 1.5
    assert parse_bytes("Name:\tx\nVmHWM:\t    12 kB\nVmRSS:\t 3 kB\n", "VmHWM") == 12 * 1024


def test_a_report_has_every_row_a_date_and_a_verdict() -> None:
    results = fake_result(), fake_result("per_param"), fake_result(ours_ms=5.0)
    text = printed(report.render(document(*results)), 80)
    names = (variant.name for variant in field())
    for words in (*names, "p50 [p25..p75]", "0.80 [0.80..0.80]", "2030-01-02 03:04 UTC"):
        assert words in text, words
    verdict = "torchddp is faster than torch's best row in 2 of 3 comparisons, slower in 1, and within noise in 0."
    assert verdict in " ".join(text.split())
    text = printed(report.render(document(step_time())), 80)
    for words in ("0.75 [0.75..0.75]", "1 (torch's best)", "step_time · MLP: 12 parameters, 25 MB"):
        assert words in text


def test_saved_results_are_split_by_case_and_read_back(tmp_path: Path) -> None:
    written = save_results(document(fake_result(), fake_result("per_param")), tmp_path / "new")
    names = [path.name for path in written]
    assert [path.suffix for path in written] == [".json", ".png"] * 2
    assert names[0].startswith("2030-01-02-exposed-") and names[2].startswith("2030-01-02-per_param-")
    saved = json.loads(written[0].read_text())
    assert [entry["case"] for entry in saved["results"]] == ["exposed"]
    assert {"cpu", "cores", "torch", "torchddp", "git_commit"} <= saved["machine"].keys()
    assert written[1].read_bytes().startswith(b"\x89PNG")


def test_a_wrong_argument_is_refused_in_one_sentence(capsys):
    for arguments, words in (
        (["--case", "nope"], "There is no case 'nope'; choose from step_time, exposed, memory, per_param, "),
        (
            ["--case", "memory", "--set", "op=broadcast"],
            "--set op=broadcast: must be NAME=VALUE with an option of memory",
        ),
        (["--model", "nope"], "There is no model 'nope'; choose from small, mlp, gpt, conv, gpt2, or"),
        (["--seconds", "nan"], "above 0 and at most 3600, not nan."),
        (["--world-size", "0"], "--world-size must be 1 to 64, not 0."),
        (["--caps", "1,x"], "--caps must be MiB separated by commas, like 1,5,25, not '1,x'."),
        (["--caps", "0,5"], "positive numbers of MiB, not '0,5'."),
        ([*TORCH, "--vs", "nodots"], "'nodots' is not a dotted path to a class"),
        ([*TORCH, "--vs", "no_such_package.Thing"], "Cannot import 'no_such_package'"),
        ([*TORCH, "--vs", "torch.nn.functional.relu"], "has no class named 'relu'."),
        (["--json", "/no/such/folder/x.json"], "--json: the folder '/no/such/folder' does not exist."),
        (["--out", "/etc/passwd"], "--out must be a folder"),
        (["--bogus"], "No such option: --bogus"),
    ):
        assert_refused(cli.main, arguments, words, capsys)


def test_a_few_cases_run_by_default_and_all_on_request() -> None:
    assert check_names([], []) == ("step_time", "exposed", "memory")
    assert check_names(["all"], []) == USERS_CASES
    assert check_names(["exposed", "memory", "exposed"], []) == ("exposed", "memory")


def test_a_package_that_does_not_load_is_reported_with_advice(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torchddp.bench.registry", None)
    assert cli.main([]) == 1
    assert "The benchmark cannot be loaded; run `torchddp doctor`" in capsys.readouterr().err
    broken = SimpleNamespace(import_error=ImportError("no libtorch"))
    for package, words in ((None, "Cannot import 'torchddp'.*make build"), (broken, "`torchddp doctor` says why")):
        monkeypatch.setitem(sys.modules, "torchddp", package)
        with pytest.raises(ArgumentError, match=words):
            load_class("torchddp.DistributedDataParallel")


@pytest.mark.slow
def test_wrong_gradients_end_the_run_and_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks get different batches even from a model with a fixed batch, or the check could not fail."""
    own = benchmark_models.__name__
    arguments = ["--case", "per_param", "--model", f"{own}:with_tuple", "--vs", f"{own}.NotAveraging"]
    assert cli.main([*arguments, *TORCH, "--seconds", "0.1", "--world-size", "2"]) == 1
    captured = capsys.readouterr()
    assert "WrongGradientsError" in captured.err and "NotAveraging' on model" in captured.err
    assert "parameter 'left.weight'" in captured.err
    assert "torch default" not in captured.out


def test_a_rank_that_dies_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    brief = ["--case", "per_param", "--seconds", "0.1", "--caps", "25"]
    assert cli.main([*brief, *TORCH, "--vs", f"{__name__}.Dying"]) == 1
    assert "rank 0: its process died without a message" in capsys.readouterr().err


@pytest.mark.slow
def test_no_rank_outlives_a_killed_command() -> None:
    arguments = ["--case", "per_param", "--world-size", "2", "--seconds", "1000", *TORCH]
    command = subprocess.Popen([sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children")
    try:
        # Two ranks and multiprocessing's resource tracker.
        assert wait_until(lambda: len(children.read_text().split()) >= 2)
        time.sleep(3)
        ranks = list(map(int, children.read_text().split()))
        command.send_signal(signal.SIGKILL)
        command.wait(300)
        assert ranks and wait_until(lambda: not any(map(is_running, ranks)))
    finally:
        command.kill()
        command.wait(300)
