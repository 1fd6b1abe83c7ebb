"""`torchddp trace`: its arguments, and the files it writes."""

import json
import os
from pathlib import Path

import pytest

from tests.programs import ROOT, python
from tests.unit.helpers import assert_refused
from torchddp.cli.app import app
from torchddp.harness.command import run_app


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
