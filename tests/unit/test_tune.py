"""`torchddp tune` and `torchddp trace`: candidates, the choice among them, kept plans, files and errors."""

import html
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.programs import ROOT, python
from tests.simulated import make_profile
from tests.unit.helpers import assert_refused, printed, remove_home
from torchddp.cli import tune_run
from torchddp.cli.app import make_app
from torchddp.cli.trace import comparison_text
from torchddp.cli.tune import _keep, answer, draw_curve, tune_table
from torchddp.cli.tune_run import Candidate, TuneResult, choose, make_candidates, predicted_ms, tune_document
from torchddp.harness import command
from torchddp.harness.command import run_app
from torchddp.harness.launch import LaunchError
from torchddp.harness.machine import new_document
from torchddp.harness.stats import paired_ratio
from torchddp.harness.tables import interval_text
from torchddp.harness.variants import ArgumentError
from torchddp.plan.plan_cache import PlanKey, load_plan
from torchddp.plan.step_profile import LinearCost, load_profile

# Four gradients of 1 MiB each, 10 ms apart.
MIB = 1024 * 1024
PROFILE = make_profile([MIB / 1e6] * 4, (30, 20, 10, 0), buckets=((3,), (2, 1, 0)), device="cpu", step_s=0.07)


def test_candidates_and_their_predicted_times() -> None:
    candidates = make_candidates(PROFILE, (100, 1, 2, 25))
    assert [c.name for c in candidates] == ["default", "planned", "1 MiB", "2 MiB", "25 MiB"]
    assert [len(c.buckets) for c in candidates][2:] == [4, 2, 1]
    assert candidates[0].buckets == PROFILE.buckets and candidates[0].argument == ""
    assert candidates[3].argument == "bucket_cap_mb=2"
    one = make_candidates(PROFILE, (100,))[2]
    assert predicted_ms(PROFILE, one) == pytest.approx(10 + 30 + 1 + 4 * MIB * 1e-6)
    assert predicted_ms(replace(PROFILE, cost=LinearCost(0.0, 0.0)), one) == pytest.approx(40)


def noisy(median: float, rounds: int = 40, noise: float = 0.5) -> np.ndarray:
    return median + noise * np.sin(np.arange(rounds) * 2.3)


def test_the_fastest_is_chosen_only_if_significant() -> None:
    clear = np.stack([noisy(100), noisy(99), noisy(80), noisy(90)])
    assert choose(clear).index == 2 and choose(clear).doubtful is None
    shuffled = np.stack([noisy(80, noise=1), noisy(100), np.roll(noisy(79.99, noise=1), 7), noisy(90)])
    assert choose(shuffled).index == 0 and choose(shuffled).doubtful is None
    # Of many equal sizes, the luckiest is a little faster.
    assert choose(np.stack([noisy(100), noisy(99), noisy(98.5, noise=0.1)])).index == 0
    # Both are faster than the default but don't differ significantly: the plan is preferred.
    assert choose(np.stack([noisy(100), noisy(80, noise=1), np.roll(noisy(79.99, noise=1), 7)])).index == 1


IDLE = {"load_average_1min": 0.1, "cores": 2}


@pytest.mark.parametrize("median", [90, 97, 105, 130])
def test_an_uncertain_answer_says_how_to_decide(median: float) -> None:
    """Seven noisy rounds are too few to decide, unless the plan is slower than the default."""
    rough = np.array([0, 15, -15, 12, -12, 20, -20])
    step_ms = np.stack([100 + rough, median + np.roll(rough, 1), 150 + rough])
    document = tune_document(TuneResult(PROFILE, make_candidates(PROFILE, (1,)), step_ms, seconds=30.0))
    said, shown = answer(document, IDLE), printed(tune_table(document))
    if median > 120:
        assert said == "Leave bucket_cap_mb out: after 7 rounds no size saves at least 2% of the default's step."
        assert document["argument"] == "" and "<- keep" in shown
        return
    assert document["in_doubt"] == "planned" and document["argument"] is None
    assert not any(row["chosen"] for row in document["candidates"])
    ratio = document["candidates"][1]["ratio_to_default"]
    told = f'bucket_cap_mb="auto" takes {ratio["median"]:.2f} of the default\'s step, {interval_text(ratio)}.'
    assert said.startswith(f"Too noisy to tell after 7 rounds, so no plan is saved: {told}")
    assert said.endswith(". Try --seconds 60.") and "<-" not in shown
    assert re.search(rf"^planned .* {ratio['median']:.2f} \[.*\]  unclear *$", shown, re.MULTILINE)
    assert "Stop other programs (the load was 3.5 on 2 cores)" in answer(document, IDLE | {"load_average_1min": 3.5})
    assert "too noisy to tell" in draw_curve(document).axes[0].get_title()


def test_a_run_that_is_too_noisy_saves_no_plan_and_exits_with_a_status_of_its_own(tmp_path, monkeypatch, capsys):
    rough = np.array([0, 15, -15, 12, -12, 20, -20])
    step_ms = np.stack([100 + rough, 95 + np.roll(rough, 1), 95 + np.roll(rough, 2)])
    result = TuneResult(PROFILE, make_candidates(PROFILE, (1,)), step_ms)
    monkeypatch.setenv("TORCHDDP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "run_command", lambda *_: result)
    assert run_tune(["--json", str(tmp_path / "t.json")]) == command.EXIT_UNSURE
    document = json.loads((tmp_path / "t.json").read_text())
    assert document.keys() == new_document("tune", "", {}).keys() and document["verdict"].startswith(
        "Too noisy to tell"
    )
    assert document["verdict"] in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "cache").exists()


def test_two_plans_are_compared_by_an_interval() -> None:
    for ratio, words in (
        ((0.8, 0.75, 0.85), "5 MiB takes 20% less time than default (0.80 of its step, 95% interval 0.75 to 0.85, 20 "),
        ((1.3, 1.1, 1.5), "5 MiB takes 30% more time than default"),
        ((1.0, 0.99, 1.01), "default and 5 MiB take the same time, to within 2%"),
        ((0.95, 0.7, 1.4), "Too noisy to tell whether default or 5 MiB is faster"),
    ):
        known = dict(
            zip(("median", "ci95_low", "ci95_high"), ratio, strict=True), q25=ratio[1], q75=ratio[2], rounds=20
        )
        said = comparison_text({"plans": ["default", "5 MiB"], "ratio": known}, (10.0, 9.0), 20)
        assert said.startswith(words) and "median steps 10.0 and 9.00 ms" in said
        assert ("--steps 80" in said) is words.startswith("Too noisy")
    few = {"plans": ["default", "5 MiB"], "ratio": paired_ratio([1.3] * 5, [1.0] * 5).to_dict()}
    said = comparison_text(few, (10.0, 13.0), 5)
    assert said.startswith("Too few steps to tell whether default or 5 MiB is faster") and "--steps 20" in said


@pytest.mark.slow
def test_a_comparison_writes_both_plans(tmp_path: Path) -> None:
    paths = {option: tmp_path / option[2:] for option in ("--out", "--json", "--html")}
    arguments = [text for option, path in paths.items() for text in (option, str(path))]
    done = python("-m", "torchddp", "trace", "--compare", "default", "0.25", "--steps", "3", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(paths["--json"].read_text())
    assert document.keys() == new_document("trace", "", {}).keys()
    results = document["results"]
    found = results[1]["comparison"]
    assert [result["plan"] for result in results] == found["plans"] == ["default", "0.25 MiB"]
    assert [result["steps_recorded"] for result in results] == [3, 3] and found["ratio"]["rounds"] == 3
    assert len(results[0]["buckets"]) != len(results[1]["buckets"])
    assert document["verdict"] in " ".join(done.stdout.split())
    page = paths["--html"].read_text()
    assert page.count('<section class="run">') == 2 and "<h2>0.25 MiB</h2>" in page
    steps = {
        event["args"]["step"] for event in json.loads(paths["--out"].read_text())["traceEvents"] if event["ph"] == "X"
    }
    assert steps == {result["step"] for result in document["results"]}


@pytest.mark.parametrize(
    "arguments", [["tune", "--plot", "x.png"], ["trace", "--plot", "x.png"], ["bench", "--out", "x"]], ids=" ".join
)
def test_a_missing_package_is_reported_before_anything_is_measured(arguments, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    words = f"error: {arguments[1]} needs matplotlib: pip install matplotlib."
    assert_refused(lambda them: run_app(make_app(), "torchddp", them), arguments, words, capsys)


def test_the_same_buckets_are_never_faster() -> None:
    """If a size gives the same buckets as the default, any difference is noise."""
    same = Candidate("1 MiB", "bucket_cap_mb=1", PROFILE.buckets, 1.0)
    candidates = (*make_candidates(PROFILE, (25,))[:1], same)
    document = tune_document(TuneResult(PROFILE, candidates, np.stack([noisy(100), noisy(80)])))
    assert (
        answer(document, IDLE)
        == "Leave bucket_cap_mb out: after 40 rounds no size saves at least 2% of the default's step."
    )
    shown = printed(tune_table(document))
    assert re.search(r"^1 MiB .* 1 +same *$", shown, re.MULTILINE) and "0.80" not in shown


RESULT = TuneResult(PROFILE, make_candidates(PROFILE, (1, 2, 25)), np.stack([*map(noisy, (100, 70, 90, 95, 110))]))


def test_table_and_plot_show_the_document() -> None:
    document = tune_document(RESULT)
    assert json.loads(json.dumps(document, allow_nan=False))["candidates"] == document["candidates"]
    assert [row["chosen"] for row in document["candidates"]] == [False, True, False, False, False]
    said = 'Use DistributedDataParallel(model, bucket_cap_mb="auto"): 30.0% less time per step than the default.'
    assert document["argument"] == 'bucket_cap_mb="auto"' and answer(document, IDLE) == said
    shown = printed(tune_table(document))
    assert all(row["name"] in shown for row in document["candidates"])
    for row in (r"planned .* 0\.70 \[.*\]  <- use", "1 MiB .* faster", "25 MiB .* slower"):  # also to a pipe
        assert re.search(rf"^{row} *$", shown, re.MULTILINE), row
    figure = draw_curve(document)
    assert {text.get_text() for text in figure.axes[0].get_xticklabels()} == {"1", "2", "25"}
    document["candidates"][0]["buckets"] = 1
    assert "default, 1 bucket" in {line.get_label() for line in draw_curve(document).axes[0].lines}


def run_tune(arguments: list[str]) -> int:
    return run_app(make_app(), "torchddp", ["tune", *arguments])


@pytest.mark.thorough
def test_a_run_saves_its_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHDDP_CACHE_DIR", str(tmp_path / "cache"))
    paths = {f"--{name}": tmp_path / f"t.{name}" for name in ("json", "plot", "profile")}
    written = [text for option, path in paths.items() for text in (option, str(path))]
    arguments = ["--model", "mlp", "--seconds", "0.2", "--caps", "4,25", *written]
    # On a busy machine the answer would be that it is too noisy to tell.
    monkeypatch.setattr(tune_run, "choose", lambda *found: replace(choose(*found), doubtful=None))
    assert run_tune(arguments) == 0, capsys.readouterr().err
    document = json.loads(paths["--json"].read_text())["results"][0]
    assert [row["name"] for row in document["candidates"]][:3] == ["default", "planned", "4 MiB"]
    found = load_profile(paths["--profile"])
    assert found.gradient_bytes == document["gradient_bytes"] == 6 * (1024 * 1024 + 1024) * 4
    assert found.step_s > 0 and found.cost.beta_s_per_byte > 0
    (kept,) = (tmp_path / "cache").iterdir()
    key = PlanKey(found.fingerprint, 2, 2, found.transport, "gloo")
    buckets = load_plan(kept, key)
    assert kept == key.path
    chosen = next(row for row in document["candidates"] if row["chosen"])
    assert buckets is not None and len(buckets) == chosen["buckets"]
    assert paths["--plot"].read_bytes().startswith(b"\x89PNG")
    assert str(kept) in capsys.readouterr().out


def test_a_plan_that_cannot_be_saved_is_reported_in_one_sentence(monkeypatch):
    keeping = partial(_keep, RESULT, tune_document(RESULT))
    monkeypatch.setenv("TORCHDDP_CACHE_DIR", "/dev/null/cache")
    with pytest.raises(ArgumentError, match=r"^Cannot save the plan as '/dev/null/cache/plan-.*'.*; see --no-keep\.$"):
        keeping()
    remove_home(monkeypatch)
    with pytest.raises(
        ArgumentError,
        match=r"no folder for plans, since there is no home directory.* Or save no plan, with --no-keep\.$",
    ):
        keeping()


def test_a_wrong_argument_is_refused_in_one_sentence(capsys):
    for arguments, words in (
        (
            ["--caps", "1,1e300"],
            "each of --caps, like 1,5,25, must be a positive number of MiB, at most 1048576, not '1e300'",
        ),
        (["--caps", "a"], "each of --caps, like 1,5,25, must be a positive number of MiB, not 'a'"),
        (["--seconds", "0"], "--seconds"),
        (["--plot", "/nowhere/x.png"], "folder '/nowhere' does not exist"),
    ):
        assert_refused(run_tune, arguments, words, capsys)


@pytest.mark.thorough
def test_a_transport_that_ranks_can_not_use_is_refused_in_one_sentence(capsys):
    assert_refused(run_tune, ["--transport", "nccl"], "--transport nccl: ", capsys)


def trace(arguments: list[str]) -> int:
    return run_app(make_app(), "torchddp", ["trace", *arguments])


def test_a_wrong_argument_of_trace_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--model", "nope"], "There is no model 'nope'; choose from small, mlp, gpt, conv"),
        (["--world-size", "1"], "With one rank there is nothing to synchronize"),
        (["--world-size", "65"], "--world-size must be 1 to 64"),
        (["--steps", "0"], "--steps must be 1 to 10000, not 0"),
        (["--bucket-cap-mb", "-1"], "--bucket-cap-mb must be a positive number of MiB, not '-1.0'"),
        (["--bucket-cap-mb", "nan"], "--bucket-cap-mb must be a positive number"),
        (["--transport", "pigeon"], "--transport: transport must be 'auto', 'c10d', 'shm' or 'nccl', got 'pigeon'"),
        (["--compare", "default", "many"], "--compare must be a positive number of MiB, default or auto, not 'many'"),
        (["--compare", "1", "5", "--bucket-cap-mb", "9"], "--compare names both plans: leave --bucket-cap-mb out."),
        (["--json", "./trace.json"], "Two arguments name the file 'trace.json'."),
        (["--out", "/nowhere/trace.json"], "--out: the folder '/nowhere' does not exist"),
        (["--plot", "/"], "--plot must be a file, but '/' is a folder"),
        (["--steps", "many"], ". See torchddp trace --help."),
        (["--compare", "5"], "Option '--compare' requires 2 arguments. See torchddp trace --help."),
    ):
        assert_refused(trace, arguments, words, capsys)


def test_the_file_of_json_says_why_a_run_failed(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise LaunchError("rank 1: its disk is full")

    monkeypatch.setattr(command, "run_ranks", fail)
    for name in ("trace", "tune"):
        path = tmp_path / f"{name}.json"
        assert run_app(make_app(), "torchddp", [name, "--json", str(path)]) == 1
        document = json.loads(path.read_text())
        assert (document["kind"], document["results"]) == (f"torchddp {name}", [])
        assert capsys.readouterr().err == f"error: {document['failures'][0]}\n"


def test_a_full_disk_is_reported_in_one_sentence(tmp_path):
    PROFILE.save(tmp_path / "p.json")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "torchddp", "simulate", tmp_path / "p.json", "--force"],
            stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "error: cannot write the output: No space left on device\n")


def test_under_torchrun_the_world_size_cannot_be_chosen(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert_refused(trace, [], "With one rank there is nothing", capsys)
    assert_refused(trace, ["--world-size", "4"], "torchrun started 1 rank; leave the option out", capsys)


@pytest.mark.slow
def test_a_run_writes_all_requested_files(tmp_path: Path) -> None:
    names = {"--out": "trace.json", "--json": "report.json", "--html": "page.html", "--plot": "step.png"}
    paths = {option: tmp_path / name for option, name in names.items()}
    arguments = [text for option, path in paths.items() for text in (option, str(path))]
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))\n"
        "    return model, torch.ones(2, 8)\n"
    )
    command = ["-m", "torchddp", "trace", "--model", "mine:make", "--steps", "4", *arguments]
    done = python(*command, cwd=tmp_path, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mine:make, 2 ranks, cpu, transport" in done.stdout
    assert all(f"wrote {path}" in "".join(done.stdout.split("\n")) for path in paths.values())
    trace_file = json.loads(paths["--out"].read_text())
    events, traffic = trace_file["traceEvents"], trace_file["otherData"]["traffic"]
    assert [each["payload_bytes"] for rank in traffic for each in rank.values()] == [324, 324]
    steps = {event["args"]["step"] for event in events if event["ph"] == "X" and "step" in event["args"]}
    (result,) = json.loads(paths["--json"].read_text())["results"]
    assert steps == {result["step"]} and 6 <= result["step"] <= 9
    assert result["world_size"] == 2 and result["steps_recorded"] == 4
    assert result["traffic"] == traffic
    assert paths["--plot"].read_bytes().startswith(b"\x89PNG")
    page = html.unescape(paths["--html"].read_text())
    assert "overlap " in page and ".weight" in page and result["verdict"] in page
    assert "sent per step: 324 B as gradients" in page
