"""`torchddp trace`: its arguments, kept bucket plans, and the files it writes."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from torch import nn

import torchddp
from tests.harness import each, on_ranks
from tests.programs import ROOT, python
from tests.unit.helpers import assert_refused
from torchddp.cli.app import app
from torchddp.cli.trace import _use_kept_plan
from torchddp.harness.command import run_app
from torchddp.harness.variants import ArgumentError
from torchddp.plan.auto_plan import plan_key


def trace(arguments: list[str]) -> int:
    return run_app(app, "torchddp", ["trace", *arguments])


def test_a_wrong_argument_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--model", "nope"], "There is no model 'nope'; choose from small, mlp, gpt, conv"),
        (["--world-size", "1"], "With one rank there is nothing to synchronize"),
        (["--world-size", "65"], "--world-size must be 1 to 64"),
        (["--steps", "0"], "--steps must be 1 to 10000, not 0"),
        (["--bucket-cap-mb", "-1"], "--bucket-cap-mb must be a positive number of MiB, not -1"),
        (["--bucket-cap-mb", "nan"], "--bucket-cap-mb must be a positive number"),
        (
            ["--plan", "kept.json", "--bucket-cap-mb", "1"],
            "--plan and --bucket-cap-mb both choose the buckets: leave one",
        ),
        (["--transport", "pigeon"], "--transport: transport must be 'auto', 'c10d', 'shm' or 'nccl', got 'pigeon'"),
        (["--out", "/nowhere/trace.json"], "--out: the folder '/nowhere' does not exist"),
        (["--plot", "/"], "--plot must be a file, but '/' is a folder"),
        (["--steps", "many"], "see torchddp trace --help"),
    ):
        assert_refused(trace, arguments, words, capsys)


def test_under_torchrun_the_world_size_cannot_be_chosen(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert_refused(trace, [], "With one rank there is nothing", capsys)
    assert_refused(trace, ["--world-size", "4"], "torchrun started 1 rank; leave the option out", capsys)


@on_ranks(1)
def test_an_unusable_plan_is_reported_in_one_sentence(tmp_path: Path) -> None:
    ddp, path = torchddp.DDP(nn.Linear(2, 2), transport="c10d"), tmp_path / "plan.json"
    head = {"kind": "torchddp bucket plan", "format": 1, **asdict(plan_key(ddp.session))}
    damaged = {}, {"buckets": 3}, {"buckets": [[1e999]]}, {"buckets": [[10**30]]}
    cases = (
        (None, "there is no file"),
        ("{", "can't be read"),
        ([], "does not fit: its kind is None"),
        ({}, "does not fit: its kind is None, here it is 'torchddp bucket plan'"),
        ({**head, "format": 99}, "does not fit: its format is 99, here it is 1"),
        ({**head, "fingerprint": "0"}, "does not fit: its fingerprint is '0', here it is"),
        *(({**head, **own}, "is damaged: its buckets are not lists of indices") for own in damaged),
        ({**head, "buckets": [[0], [7]]}, "bucket 1 holds parameter index 7: allowed are 0 to 1"),
    )
    for content, words in each(cases):
        if content is not None:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(ArgumentError) as caught:
            _use_kept_plan(path, ddp)
        message = str(caught.value)
        assert message.startswith("--plan: ") and words in message and "\n" not in message, content
    path.write_text(json.dumps({**head, "buckets": [[0], [1]]}))
    _use_kept_plan(path, ddp)
    assert len(ddp.reducer.plan) == 2


@pytest.mark.thorough
def test_a_saved_plan_is_traced_if_it_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torchddp.ddp.model import param_specs
    from torchddp.harness.models import make_model
    from torchddp.plan.plan_cache import PlanKey, fingerprint, save_plan

    path, report = tmp_path / "plan.json", tmp_path / "report.json"
    files = ["--plan", str(path), "--out", str(tmp_path / "t.json"), "--json", str(report)]
    assert trace(files) == 2
    assert capsys.readouterr().err == f"error: --plan: there is no file '{path}'.\n"
    named = list(make_model("mlp", 0).named_parameters())
    specs = param_specs([p for _, p in named], [name for name, _ in named], [False] * len(named))
    key = PlanKey(fingerprint(specs, "cpu"), 2, 2, "c10d", "gloo")
    buckets = (tuple(reversed(range(6, len(named)))), tuple(reversed(range(6))))
    save_plan(path, buckets, key, None)
    assert trace([*files, "--transport", "c10d", "--steps", "3"]) == 0, capsys.readouterr().err
    assert len(json.loads(report.read_text())["results"][0]["buckets"]) == 2


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
    assert [rank["traffic"] for rank in result["ranks"]] == traffic
    assert paths["--plot"].read_bytes().startswith(b"\x89PNG")
    page = paths["--html"].read_text()
    assert "data:image/png;base64" in page and "overlap ratio" in page and ".weight" in page
    assert "sent per step: 0.000324 MB" in page
