"""The benchmark command: its arithmetic, its tables, its errors, and that it leaves no process behind."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from torchddp.bench import cli, gradients, report, timing
from torchddp.bench.cases import MAX_ROUNDS, MIN_ROUNDS
from torchddp.bench.memory import memory_result, parse_bytes
from torchddp.bench.registry import CASES, check_names
from torchddp.bench.report import save_results
from torchddp.bench.results import bars
from torchddp.harness import machine, stats
from torchddp.harness.command import parse_caps
from torchddp.harness.models import MODELS, make_batch, make_model
from torchddp.harness.tables import number
from torchddp.harness.variants import TORCH_DDP, ArgumentError, Role, Variant, load_class, make_variants

ROOT = Path(__file__).resolve().parents[2]
TORCH = ["--ours", TORCH_DDP]


class NotAveraging(nn.Module):
    """A wrapper that forgets to communicate."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.module(inputs)


class Dying(NotAveraging):
    """A wrapper whose process is gone before it is built."""

    def __init__(self, module: nn.Module) -> None:
        os._exit(3)


# --- arithmetic ------------------------------------------------------------------------------------------------------


def test_summary_is_the_quantiles() -> None:
    summary = stats.summarize([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (summary.median, summary.q25, summary.q75) == (3.0, 2.0, 4.0)
    assert summary.p90 == pytest.approx(4.6)


def test_summary_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        stats.summarize([])


def test_paired_ratio_pairs_the_rounds() -> None:
    # The machine slows down tenfold; only a per-round ratio sees that ours is always half of theirs.
    theirs = np.array([1.0, 1.0, 1.0, 10.0, 10.0])
    ratio = stats.paired_ratio(theirs / 2, theirs)
    assert (ratio.median, ratio.q25, ratio.q75) == (0.5, 0.5, 0.5)
    assert (ratio.rounds, ratio.odd_rounds) == (5, 0)


def test_paired_ratio_keeps_the_side_of_rounds_without_a_quotient() -> None:
    ratio = stats.paired_ratio([1.0, 1.0, 3.0, -2.0, 1.0], [2.0, 2.0, -1.0, 0.0, 2.0])
    assert ratio.median == 0.5
    assert ratio.odd_rounds == 2
    mostly_noise = stats.paired_ratio([1.0, 1.0, 1.0], [0.0, -1.0, 2.0])
    assert math.isinf(mostly_noise.median)
    assert mostly_noise.to_dict()["median"] is None


def test_paired_ratio_wants_pairs() -> None:
    with pytest.raises(ValueError, match="got 1 and 2"):
        stats.paired_ratio([1.0], [1.0, 2.0])


@given(st.lists(st.floats(0.1, 1e3), min_size=1, max_size=60), st.floats(0.1, 10))
def test_a_constant_factor_is_found_exactly(theirs: list[float], factor: float) -> None:
    ratio = stats.paired_ratio(np.array(theirs) * factor, theirs)
    for value in (ratio.median, ratio.q25, ratio.q75, ratio.ci95_low, ratio.ci95_high, ratio.of_medians):
        assert value == pytest.approx(factor)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=80))
def test_the_interval_of_the_median_holds_the_median(values: list[float]) -> None:
    low, high = stats.median_interval(np.sort(values))
    assert low <= np.median(values) <= high


def test_the_interval_of_the_median_narrows_with_more_rounds() -> None:
    few, many = (stats.median_interval(np.linspace(0, 1, count)) for count in (16, 1600))
    assert many[1] - many[0] < (few[1] - few[0]) / 5


def test_running_median_forgets_an_outlier_and_follows_a_drift() -> None:
    values = np.array([1.0, 1.0, 99.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0])
    smooth = stats.running_median(values, 1)
    assert smooth.tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0]


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    by_rank = np.array([[[1.0, 5.0]], [[2.0, 3.0]]])
    assert stats.slowest_rank(by_rank).tolist() == [[2.0, 5.0]]


@pytest.mark.parametrize(
    ("rounds", "elapsed_s", "is_enough"),
    [
        (100, 9.9, False),
        (100, 10.0, True),
        (MIN_ROUNDS - 1, 99.0, False),
        (MIN_ROUNDS, 99.0, True),
        (MAX_ROUNDS, 0.1, True),
    ],
)
def test_rounds_follow_the_time_budget_within_limits(rounds: int, elapsed_s: float, is_enough: bool) -> None:
    assert timing.enough(rounds, elapsed_s, seconds=10.0) is is_enough


# --- the field and its results ---------------------------------------------------------------------------------------


def field() -> tuple[Variant, ...]:
    return make_variants("torchddp.DistributedDataParallel", ["a.b.C", "a.d.C"], (1, 25))


def test_the_field_has_torch_default_torch_tuned_ours_and_peers() -> None:
    variants = field()
    assert [variant.name for variant in variants] == [
        "no DDP",
        "torch default",
        "torch tuned, cap 1",
        "torch tuned, cap 25",
        "torchddp default",
        "vs a.C",
        "vs a.C (2)",
    ]
    assert variants[3].keywords == {
        "gradient_as_bucket_view": True,
        "batched_grad_copy": True,
        "static_graph": True,
        "bucket_cap_mb": 25,
    }


def test_ours_tuned_adds_rows_but_the_default_stands_for_us() -> None:
    variants = make_variants("torchddp.DistributedDataParallel", [], (5,), ours_tuned=True)
    assert [v.name for v in variants if v.role is Role.OURS] == ["torchddp default", "torchddp tuned, cap 5"]


def fake_result(case: str = "exposed", ours_ms: float = 2.0) -> dict[str, Any]:
    """Local 10 ms; torch default +4, cap 1 +2.5, cap 25 +3; ours + `ours_ms`; peers +8."""
    added_ms = np.array([0.0, 4.0, 2.5, 3.0, ours_ms, 8.0, 8.0])
    step_ms = 10.0 + added_ms[:, None] + np.zeros((1, 40))
    raw = {"model": "small", "title": "1000 small tensors", "parameters": 1000, "gradient_bytes": 256000}
    return gradients.timed_result(CASES[case], field(), {**raw, "step_ms": step_ms}, world_size=2)


def row(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(entry for entry in result["variants"] if entry["name"] == name)


def test_torch_best_is_the_fastest_of_torchs_rows_even_if_ours_is_faster() -> None:
    result = fake_result()
    assert result["best_torch"] == "torch tuned, cap 1"
    assert row(result, "torchddp default")["ratio_to_best_torch"]["median"] == pytest.approx(0.8)
    assert row(result, "torch tuned, cap 1")["ratio_to_best_torch"] is None
    assert "cost" not in row(result, "no DDP")


def test_per_param_cost_is_us_for_each_parameter() -> None:
    result = fake_result("per_param")
    assert row(result, "torch default")["cost"]["median"] == pytest.approx(4.0)  # 4 ms over 1000 parameters
    assert result["unit"] == "us/param"


def test_memory_counts_beyond_the_bare_model_in_gradient_copies() -> None:
    variants = (Variant("no DDP", Role.LOCAL), Variant("ours", Role.OURS, "a.B"))
    common = {"model": "mlp", "title": "MLP", "parameters": 12, "gradient_bytes": 20, "method": "x"}
    raws = [{**common, "peak_rss_bytes": peak, "grad_storage_bytes": 20} for peak in (100, 130)]
    result = memory_result(variants, raws, world_size=2)
    assert [entry["extra_bytes"] for entry in result["variants"]] == [0, 30]
    assert result["variants"][1]["extra_gradient_copies"] == 1.5


def test_bars_carry_the_quartiles() -> None:
    entries = bars(fake_result())
    assert [entry[0] for entry in entries] == [v.name for v in field()[1:]]
    assert entries[0] == ("torch default", "torch", pytest.approx(4.0), pytest.approx(0.0), pytest.approx(0.0))


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.rest_is_thorough("[!g]*", "gpt")
@pytest.mark.parametrize("name", MODELS)
def test_models_give_every_parameter_a_gradient(name: str) -> None:
    model = make_model(name, seed=0)
    model(make_batch(name, 0, rank=0, index=0)).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, parameter_name


def test_model_sizes_are_those_the_tables_name() -> None:
    assert len(list(make_model("small", 0).parameters())) == 1000
    assert sum(p.numel() for p in make_model("gpt", 0).parameters()) == pytest.approx(17e6, rel=0.03)


def test_ranks_and_steps_see_different_data() -> None:
    batches = [make_batch("mlp", 0, rank, index) for rank in (0, 1) for index in (0, 1)]
    assert all(not torch.equal(a, b) for i, a in enumerate(batches) for b in batches[:i])


# --- the report ------------------------------------------------------------------------------------------------------


def document(*entries: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": "2030-01-02T03:04:05+00:00",
        "command": "python -m benchmarks",
        "machine": machine.describe_machine(),
        "settings": {"quick": False},
        "results": list(entries),
    }


def printed(renderable: Any, width: int = 80) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(renderable)
    return stream.getvalue()


@pytest.mark.parametrize("columns", [60, 80])
def test_report_fits_its_columns_and_cuts_nothing(columns: int) -> None:
    text = printed(report.render(document(fake_result(), fake_result("per_param"))), columns)
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text and ("no room for: step p90" in text) is (columns == 60)
    for variant in field():
        assert variant.name in text
    assert "p50 [p25..p75]" in text
    assert "0.80 [0.80..0.80]" in text


def test_a_report_has_a_date_and_a_verdict() -> None:
    run = document(fake_result(), fake_result("per_param"), fake_result(ours_ms=5.0))
    text = " ".join(printed(report.render(run)).split())
    assert (
        "torchddp is faster than torch's best row in 2 of 3 comparisons, slower in 1, and not told apart in 0." in text
    )
    assert "2030-01-02 03:04 UTC" in text


def test_an_option_of_every_wrapper() -> None:
    variants = make_variants(TORCH_DDP, ["a.b.C"], (25,), extra={"find_unused_parameters": True})
    assert all(v.keywords["find_unused_parameters"] is True for v in variants if v.role is not Role.LOCAL)
    assert variants[0].keywords == {} and variants[2].keywords["bucket_cap_mb"] == 25


def test_summary_names_torchs_best_cap_and_keeps_a_loss() -> None:
    lost = fake_result(ours_ms=5.0)
    text = printed(gradients.summary_table([fake_result(), lost]))
    assert text.count("2.50 @1") == 2
    assert "0.95 met" in text and "0.95 missed" in text
    assert "2.00 [2.00..2.00]" in text


def test_a_goal_within_the_noise_is_neither_met_nor_missed() -> None:
    result = fake_result()
    ratio = gradients.our_row(result)["ratio_to_best_torch"]
    ratio.update(median=0.94, ci95_low=0.9, ci95_high=0.97)
    assert str(gradients.goal_text(result)) == "0.95 unclear"
    ratio.update(median=0.5, ci95_low=0.4, ci95_high=0.6)
    assert str(gradients.goal_text(result)) == "0.95 met"
    ratio.update(odd_rounds=ratio["rounds"] // 2)
    assert str(gradients.goal_text(result)) == "0.95 unclear"


def test_a_goal_is_for_the_models_of_the_case_only() -> None:
    raw = {"model": "a.b:c", "title": "a.b:c", "parameters": 2, "gradient_bytes": 8, "step_ms": np.ones((7, 40))}
    result = gradients.timed_result(CASES["per_param"], field(), raw, world_size=1)
    assert result["goal_ratio"] is None and str(gradients.goal_text(result)) == ""
    assert fake_result("per_param")["goal_ratio"] == 0.15
    text = printed(gradients.summary_table([result]))
    assert max(map(len, text.splitlines())) <= 80 and "a.b:c" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(123.4, "123"), (12.34, "12.3"), (1.234, "1.23"), (0.1234, "0.123"), (-12.34, "-12.3"), (None, "inf")],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_saved_results_are_split_by_case_and_read_back(tmp_path: Path) -> None:
    written = save_results(document(fake_result(), fake_result("per_param")), tmp_path / "new")
    names = [path.name for path in written]
    assert [path.suffix for path in written] == [".json", ".png"] * 2
    assert names[0].startswith("2030-01-02-exposed-") and names[2].startswith("2030-01-02-per_param-")
    saved = json.loads(written[0].read_text())
    assert [entry["case"] for entry in saved["results"]] == ["exposed"]
    assert {"cpu", "cores", "torch", "torchddp", "git_commit"} <= saved["machine"].keys()
    assert written[1].read_bytes().startswith(b"\x89PNG")


def test_machine_slug_is_a_plain_file_name() -> None:
    assert machine.machine_slug({"cpu": "Intel(R) Xeon(R) CPU @ 2.7GHz", "cores": 2}) == "intel-xeon-cpu-2-7ghz-2c"
    assert machine.parse_cpu_model("processor: 0\nmodel name\t: Some  CPU\n") == "Some CPU"
    assert machine.parse_cpu_model("processor: 0\n") is None


def test_peak_of_a_status_text() -> None:
    assert parse_bytes("Name:\tx\nVmHWM:\t    12 kB\nVmRSS:\t 3 kB\n", "VmHWM") == 12 * 1024
    with pytest.raises(ValueError, match="VmHWM"):
        parse_bytes("Name:\tx\n", "VmHWM")


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--case", "nope"], "There is no case 'nope'; choose from step_time, overlap, collective, startup, memory, "),
        (
            ["--model", "nope"],
            "There is no model 'nope'; choose from small, mlp, gpt, conv, resnet50, gpt2, llama, or name your own",
        ),
        (["--seconds", "-3"], "above 0 and up to 3600, not -3."),
        (["--seconds", "nan"], "not nan."),
        (["--seconds", "soon"], "Invalid value for '--seconds'"),
        (["--world-size", "0"], "--world-size wants 1 to 64 ranks, not 0."),
        (["--caps", "1,x"], "not '1,x'."),
        (["--caps", "0,5"], "positive numbers of MiB, not '0,5'."),
        ([*TORCH, "--vs", "nodots"], "'nodots' is not a dotted path to a class"),
        ([*TORCH, "--vs", "no_such_package.Thing"], "Cannot import 'no_such_package'"),
        ([*TORCH, "--vs", "torch.nn.Nope"], "Module 'torch.nn' has no class named 'Nope'."),
        ([*TORCH, "--vs", "torch.nn.functional.relu"], "has no class named 'relu'."),
        (["--json", "/no/such/folder/x.json"], "the folder '/no/such/folder' does not exist."),
        (["--out", "/etc/passwd"], "--out wants a folder"),
        (["--bogus"], "No such option: --bogus"),
    ],
)
def test_a_bad_argument_is_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert words in captured.err


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "\n    torchddp bench --case exposed --vs mypackage.MyDDP" in capsys.readouterr().out


def test_cases_are_a_few_by_default_and_all_on_request() -> None:
    assert check_names([], []) == ("step_time", "overlap", "memory")
    assert check_names(["all"], []) == tuple(CASES)
    assert check_names(["exposed", "memory", "exposed"], []) == ("exposed", "memory")


def test_any_case_with_models_takes_any_model() -> None:
    assert check_names([], ["conv"]) == ("step_time", "overlap", "memory")
    assert check_names(["memory"], ["conv"]) == ("memory",)
    assert check_names(["all"], ["a.b:c"]) == tuple(case for case in CASES if case != "collective")


def test_caps_are_numbers_without_repeats() -> None:
    assert parse_caps("1,0.5,1") == (1.0, 0.5)


def test_an_extension_that_does_not_load_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchddp", None)
    with pytest.raises(ArgumentError, match=r"Cannot import 'torchddp'.*make build"):
        load_class("torchddp.DistributedDataParallel")


# --- launches --------------------------------------------------------------------------------------------------------

BRIEF = ["--case", "per_param", "--seconds", "0.1", "--caps", "25"]


def test_a_run_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert cli.main([*BRIEF, *TORCH, "--json", str(path)]) == 0
    assert "torch tuned, cap 25" in capsys.readouterr().out
    (result,) = json.loads(path.read_text())["results"]
    assert result["parameters"] == 1000 and result["world_size"] == 1
    assert result["rounds"] >= MIN_ROUNDS
    assert all(entry["step_ms"]["median"] > 0 for entry in result["variants"])


@pytest.mark.thorough
def test_a_run_of_collectives_writes_its_numbers_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    arguments = ["--op", "all_reduce", "--quick", "--seconds", "0.1", "--json", str(path), "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    printed_text = capsys.readouterr().out
    assert "collective · all_reduce, fp32, 2 ranks" in printed_text
    (result,) = json.loads(path.read_text())["results"]
    assert [size["bytes"] for size in result["sizes"]] == [1024, 65536, 16 * 1024**2]
    for size in result["sizes"]:
        assert size["rounds"] >= MIN_ROUNDS
        assert {"gloo", "c10d"} <= {entry["name"] for entry in size["implementations"]}
        assert all(entry["time_us"]["median"] > 0 for entry in size["implementations"])
    assert result["sizes"][-1]["roofline_us"] > 0
    assert len(list(tmp_path.glob("*-collective-*.png"))) == 1


@pytest.mark.slow
def test_wrong_gradients_end_the_run_and_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    peer = f"{__name__}.NotAveraging"
    assert cli.main([*BRIEF, *TORCH, "--world-size", "2", "--vs", peer]) == 1
    captured = capsys.readouterr()
    assert "WrongGradientsError" in captured.err and "NotAveraging' on model 'small'" in captured.err
    assert "parameter 'scales.0'" in captured.err
    assert "torch default" not in captured.out


def test_a_rank_that_dies_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*BRIEF, *TORCH, "--vs", f"{__name__}.Dying"]) == 1
    assert "rank 0: its process died without a message" in capsys.readouterr().err


def children_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Any, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
def test_no_rank_outlives_a_killed_command() -> None:
    arguments = ["--case", "per_param", "--world-size", "2", "--seconds", "60", *TORCH]
    command = subprocess.Popen([sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        # Two ranks and multiprocessing's resource tracker.
        assert wait_until(lambda: len(children_of(command.pid)) >= 2, 60)
        time.sleep(3)
        ranks = children_of(command.pid)
        command.send_signal(signal.SIGKILL)
        command.wait(10)
        assert ranks and wait_until(lambda: not any(map(is_running, ranks)), 10)
    finally:
        command.kill()
        command.wait(10)
