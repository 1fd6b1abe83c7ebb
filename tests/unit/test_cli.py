"""What all commands share: help, completion, models from files, errors in user code, output files, Ctrl-C."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from tests.harness import each
from tests.programs import ROOT
from tests.unit.helpers import assert_refused, wait_until
from torchddp.cli.app import make_app
from torchddp.harness import models
from torchddp.harness.command import check_output, run_app
from torchddp.harness.launch import Inbox, LaunchError, RankJob, follow, launch
from torchddp.harness.models import find_factory, prove
from torchddp.harness.variants import ArgumentError

UNUSED = "tests.unit.benchmark_models:unused"
COMMANDS = ["doctor", "trace", "tune", "simulate", "bench"]

# --- help and completion ---------------------------------------------------------------------------------------------


def test_h_and_help_print_the_same_help_with_examples() -> None:
    for command in COMMANDS:
        short, long = (CliRunner().invoke(make_app(), [command, option]) for option in ("-h", "--help"))
        assert short.exit_code == 0 and short.output == long.output, command
        assert "Examples:\n" in short.output and f"torchddp {command}" in short.output, command
        paragraphs = short.output.split("Options:")[0]
        assert max(map(len, paragraphs.splitlines())) <= 80, command
        assert ("--find-unused-parameters" in short.output) is (command in ("trace", "tune", "bench")), command


def test_the_shell_completes_commands_and_values() -> None:
    for words, completed in (
        ("torchddp t", {"trace", "tune"}),
        ("torchddp trace --model g", {"gpt", "gpt2"}),
        ("torchddp tune --transport s", {"shm"}),
        ("torchddp simulate --link eth1", {"eth1", "eth10", "eth100"}),
        ("torchddp bench --case e", {"exposed"}),
    ):
        variables = {"_TORCHDDP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        found = CliRunner().invoke(make_app(), [], prog_name="torchddp", env=variables).output
        assert set(found.split()) == completed, words
    assert "--install-completion" in CliRunner().invoke(make_app(), ["-h"]).output


# --- models ----------------------------------------------------------------------------------------------------------

MODEL = """\
import torch
from beside import WIDTH

def make():
    return torch.nn.Linear(WIDTH, 2), torch.ones(3, WIDTH)

def broken():
    torch.nn.Linear("eight", 2)

def wrong_loss():
    return torch.nn.Linear(8, 2), torch.ones(3, 8), lambda output: output.view(99)
"""


@pytest.fixture
def model_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside.py").write_text("WIDTH = 8\n")
    path = tmp_path / f"own_{tmp_path.name}.py"
    path.write_text(MODEL)
    return path


def test_a_model_may_be_given_by_its_file(model_file: Path) -> None:
    assert find_factory(f"{model_file}:make")()[0].in_features == 8
    assert sys.modules[model_file.stem].WIDTH == 8  # pickle looks up its classes there


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake the parts of a process group that `prove` uses."""
    monkeypatch.setattr(models.dist, "get_rank", lambda: 0)


@pytest.mark.parametrize(
    ("factory", "line", "said"),
    [("broken", 8, "the factory raised TypeError: "), ("wrong_loss", 11, "the loss raised RuntimeError: shape")],
)
def test_an_error_in_user_code_names_the_line_that_raised_it(factory, line, said, model_file, alone):
    with pytest.raises(ArgumentError) as caught:
        prove(f"{model_file}:{factory}", 0)
    message = str(caught.value)
    assert said in message and message.count("\n") == 0
    assert message.endswith(f", at {model_file}:{line}: {MODEL.splitlines()[line - 1].strip()}.")


def torchddp(arguments: list[str]) -> int:
    return run_app(make_app(), "torchddp", arguments)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import torch\n\nraise ValueError('no\\ndata')\n", "ValueError: no data, at {path}:3: raise ValueError("),
        ("def make(:\n", "SyntaxError: invalid syntax, at {path}:1: def make(:."),
        ("import no_such\n", "ModuleNotFoundError: No module named 'no_such', at {path}:1: import no_such."),
    ],
)
def test_a_file_that_does_not_load_is_refused_before_any_rank_starts(text, said, tmp_path, capsys):
    path = tmp_path / "wrong.py"
    path.write_text(text)
    words = f"error: --model {path}:make: cannot import '{path}': {said.format(path=path)}"
    assert_refused(torchddp, ["trace", "--model", f"{path}:make", "--out", str(tmp_path / "t.json")], words, capsys)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("train.py", "train.py: also name the function that makes the model, like train.py:make."),
        ("nowhere.py:make", "nowhere.py:make: there is no file 'nowhere.py'."),
        (":make", "must be a built-in model, package.module:factory or file.py:factory"),
    ],
)
def test_a_missing_model_is_reported_in_one_sentence(model, said, capsys):
    assert_refused(torchddp, ["trace", "--model", model], f"error: --model {said}", capsys)


def _first_batch(reporter: object) -> int:
    return int(next(iter(torch.utils.data.DataLoader([7], num_workers=1))))


def test_a_model_may_take_its_batch_from_a_loader_with_workers() -> None:
    assert launch(RankJob("test", _first_batch, (), 1), print) == 7


def test_an_unused_parameter_requires_the_option(alone: None) -> None:
    with pytest.raises(ArgumentError, match="'idle.weight' got no gradient.*add --find-unused-parameters"):
        prove(UNUSED, 0)
    prove(UNUSED, 0, find_unused_parameters=True)


def test_a_model_with_unused_parameters_runs(tmp_path, capsys):
    command = ["trace", "--steps", "2", "--model", UNUSED, "--out", str(tmp_path / "trace.json")]
    assert torchddp([*command, "--find-unused-parameters"]) == 0, capsys.readouterr().err


# --- outputs ---------------------------------------------------------------------------------------------------------


def test_unusable_output_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, folder = tmp_path / "there.json", tmp_path / "folder"
    there.touch()
    folder.mkdir()
    check_output(there, "--out", folder=False)  # will be overwritten
    check_output(folder / "new" / "newer", "--out", folder=True)  # will be created
    cases = [
        (folder, False, "--out must be a file, but .* is a folder"),
        (there, True, "--out must be a folder, but .* is a file"),
        (tmp_path / "no" / "x.json", False, "the folder .* does not exist"),
        (there / "below", True, "cannot write to"),
        (tmp_path / ("x" * 300), False, "--out: cannot write to .*: File name too long"),
    ]
    for path, is_folder, said in each(cases):
        with pytest.raises(ArgumentError, match=said):
            check_output(path, "--out", folder=is_folder)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    for path, is_folder in [(there, False), (tmp_path / "new.json", False), (folder / "new" / "newer", True)]:
        with pytest.raises(ArgumentError, match=f"--out: cannot write to '{path}'"):
            check_output(path, "--out", folder=is_folder)


# --- Ctrl-C and SIGTERM ----------------------------------------------------------------------------------------------


def test_a_second_interrupt_does_not_disturb_the_cleanup(capsys: pytest.CaptureFixture[str]) -> None:
    cleaned = []
    one = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})

    @one.command()
    def wait() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            cleaned.append(True)

    before = signal.getsignal(signal.SIGINT)
    assert run_app(one, "one", []) == 130
    assert cleaned == [True] and capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGINT) is before


SLOW = """\
import multiprocessing, pathlib, sys, time, torch
MARK = pathlib.Path(__file__).with_name("reached")

def in_rank():
    return multiprocessing.parent_process() is not None

if {when!r} == "import" and in_rank():
    MARK.touch()
    time.sleep(1000)

class Slow(torch.nn.Linear):
    def forward(self, inputs):
        if {when!r} == "step" and torch.distributed.is_initialized():
            MARK.touch()
        return super().forward(inputs)

def make():
    return Slow(200, 400), torch.ones(3, 200)
"""
# An import finder that simulates slow disks: it blocks when a module is imported.
SLOW_IMPORT = """\
import pathlib, sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {when!r}:
            pathlib.Path("reached").touch()
            time.sleep(1000)
sys.meta_path.insert(0, Finder())
sys.argv = ["/somewhere/bin/torchddp", "doctor"]
from torchddp.cli import main
main()
"""


def group_members(group: int) -> list[int]:
    """The live processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) == group and state != "Z":
                found.append(int(path.parent.name))
    return found


@pytest.mark.rest_is_thorough("import-torch", "trace-step", "doctor")
@pytest.mark.parametrize(
    ("command", "when"),
    [
        pytest.param(None, "torch", id="import-torch"),
        pytest.param(None, "torchddp._import_check", id="import-torchddp"),
        pytest.param(["trace"], "import", id="trace-import"),
        pytest.param(["trace", "--steps", "10000"], "step", id="trace-step"),
        pytest.param(["tune", "--no-keep"], "step", id="tune-step"),
        pytest.param(["bench", "--case", "memory"], "step", id="bench-step"),  # SIGTERM
        pytest.param(["doctor"], "", id="doctor"),
    ],
)
def test_ctrl_c_prints_one_line_and_leaves_no_process_or_file(command, when, tmp_path):
    is_terminated = command is not None and command[0] == "bench"
    (tmp_path / "slow.py").write_text(SLOW.format(when=when))
    program = ["-c", SLOW_IMPORT.format(when=when)] if command is None else ["-m", "torchddp", *command]
    if command is not None and when:
        program += ["--model", "slow.py:make"]
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, *program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)},
        start_new_session=True,  # the whole group is signaled, as a terminal does
    )

    def is_reached() -> bool:
        if command == ["doctor"]:
            return len(group_members(process.pid)) == 4  # with two ranks and multiprocessing's tracker
        return (tmp_path / "reached").exists()

    try:
        wait_until(lambda: is_reached() or process.poll() is not None)
        assert is_reached(), process.communicate(timeout=1)
        os.kill(process.pid, signal.SIGTERM) if is_terminated else os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=300)
        expected = (143, "") if is_terminated else (130, "interrupted\n")
        assert (process.returncode, errors) == expected, (output, errors)
        assert "Traceback" not in output
        assert wait_until(lambda: not group_members(process.pid))  # multiprocessing's tracker ends with the command
        # Shared memory is anonymous (memfd_create), so it is freed with them.
        assert list(scratch.iterdir()) == []
    finally:
        for pid in group_members(process.pid):
            os.kill(pid, signal.SIGKILL)


def test_ranks_with_the_same_error_or_no_message_are_named_together() -> None:
    silent, _ = pipe = multiprocessing.Pipe()
    words = (
        r"^Case 'trace' stopped: no message from ranks \[0, 1\] for 0\.01 s\. .* try fewer ranks or a smaller model\."
    )
    with pytest.raises(LaunchError, match=words):
        follow(Inbox([silent], print), RankJob("trace", print, (), 2), 0.01)
    assert not any(end.closed for end in pipe)
    inbox = Inbox([], lambda what, done, total: None)
    inbox.errors |= {2: "ValueError: no", 1: "ValueError: no", 3: "KeyError: 'x'", 0: "TransportError: rank 1 has left"}
    job = RankJob("trace", print, (), 4)
    words = "^Case 'trace' failed: ranks 1, 2: ValueError: no; rank 3: KeyError: 'x'$"
    with pytest.raises(LaunchError, match=words):
        follow(inbox, job, 1.0)


def test_files_are_written_although_nobody_reads_the_report(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from torchddp.harness.command import make_console, write_outputs
console = make_console()
for _ in range(1000):
    console.print("of a long report " * 20)
write_outputs(console, {{}}, None, (Path({str(tmp_path / "out")!r}), lambda path: path.write_text("numbers")))
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0
    assert (tmp_path / "out").read_text() == "numbers"


@pytest.mark.parametrize("arguments", ["doctor", "trace --model small --steps 2 --out {0}/trace --json {0}/report"])
def test_a_command_runs_with_closed_streams(arguments, tmp_path):
    command = f"{sys.executable} -m torchddp {arguments.format(tmp_path)}"
    assert subprocess.run(f"{command} <&- >&- 2>&-", shell=True, cwd=ROOT).returncode == 0


@pytest.mark.parametrize("locale", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_a_report_is_printed_in_any_encoding(locale: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WIDTH = 8\n")
    html = tmp_path / "page.html"
    (tmp_path / "модель.py").write_text(MODEL, encoding="utf-8")
    model = f"{tmp_path}/модель.py:make"
    options = ["trace", "--model", model, "--steps", "2", "--out", str(tmp_path / "trace"), "--html", str(html)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C", **locale}
    command = [sys.executable, "-m", "torchddp", *options]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "exposed" in " ".join(ended.stdout.split())
    page = html.read_text(encoding="utf-8")
    assert " · torch " in page and model in page
