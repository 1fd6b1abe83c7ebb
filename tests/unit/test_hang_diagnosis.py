"""Hang reports: the diagnosis of ranks' states, its text and JSON, and how states are collected."""

import json
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest

from tests.programs import python
from tests.unit.helpers import wait_until
from torchddp import Checks
from torchddp.ddp import checks
from torchddp.ddp.module import options_of
from torchddp.diagnose import diagnosis, rank_state
from torchddp.diagnose.diagnosis import diagnose, ranks_text
from torchddp.diagnose.rank_state import CallState, Frame, RankState
from torchddp.transport.waits import _stat, look_up, process_identity

WHO = {"host": "node1", "pid": 17, "kernel": "", "started": 0}
TRAIN = Frame("/home/me/train.py", 88, "load", "user")
IN_BACKWARD = [TRAIN, Frame("/x/torch/autograd/graph.py", 4, "_engine_run_backward", "torch")]
BOOM = {"type": "ValueError", "message": "boom\nat line 3", "where": "forward", "stack": [], "age_s": 1.0}


def call(function, line, thread=1, ranks=(), waited_s=61.2, peer=-1):
    group = f'group "tp" of {ranks_text(list(ranks))}' if ranks else ""
    return CallState(function, "/home/me/train.py", line, group, list(ranks), peer, waited_s, thread, frame=line)


def waits(rank, step=41, bucket=5, waited_s=31.2, **more):
    known = {"waits_for": "the reduction", "num_buckets": 9, "armed": True}
    return RankState(rank, WHO, step=step, phase="waiting", bucket=bucket, waited_s=waited_s, **known, **more)


def other(rank, phase="backward", step=41, **more):
    values = {"num_buckets": 9, "stack": [TRAIN], **more}
    return RankState(rank, WHO, step=step, phase=phase, **values)


def missing(parameters, phase="backward", **more):
    return other(3, phase, armed=True, missing=parameters, **more)


# A rank's state, and words of its diagnosis.
CASES = [
    (
        missing({5: ["a.weight"], 6: ["b"]}, exception={**BOOM, "where": "handled"}),
        "a.weight (bucket 5 of 9, step 41); its backward is over: it raised an error, or the loss does not depend on "
        "a.weight, b; it is handling ValueError: boom",
    ),
    (
        missing({6: ["a", "b", "c", "d", "e"]}),
        "has not produced a, b, c and 2 more (bucket 6 of 9, step 41); its backward is over: it raised an error, or "
        "the loss does not depend on a, b, c and 2 more",
    ),
    (
        missing({5: ["a"]}, stack=IN_BACKWARD),
        "has not produced a (bucket 5 of 9, step 41); it is at train.py:88 in load",
    ),
    (
        missing({5: ["a"]}, phase="forward", calls=[call("barrier", 33, waited_s=2.0)], thread=1),
        "its backward has produced none yet; it is in barrier at train.py:33",
    ),
    (other(3, "forward", exception=BOOM), "the forward of step 41; it left forward with ValueError: boom"),
    (other(3, "forward", exception={**BOOM, "age_s": 99.0}), "has not ended the forward of step 41"),
    (
        other(3, "idle", step=40, exception={**BOOM, "where": "handled"}),
        "has finished step 40 (ranks 0-2 are at 41): it is late, has skipped a batch, or has none left; "
        "it is handling ValueError: boom",
    ),
    (
        other(3, "forward", step=40),
        "is at step 40 (ranks 0-2 are at 41), in forward: it is late, or has begun one batch fewer",
    ),
    (other(3, "forward", step=42), "is at step 42 (ranks 0-2 are at 41): it runs one more batch"),
    (waits(3, step=40, bucket=0), "and waits there for the reduction of bucket 0 of 9 (step 40)"),
    (
        RankState(3, WHO, step=41, phase="waiting", waits_for="the broadcast of buffers"),
        "waits for the broadcast of buffers (step 41) instead",
    ),
    (
        other(3, "waiting", waits_for=diagnosis.IN_HOOK, bucket=4),
        "is in the communication hook of bucket 4 of 9 (step 41); it is at",
    ),
    (other(3, "idle", error="rank 3: no memory\nlook"), "has left step 41, which failed there: rank 3: no memory"),
    (other(3, "idle"), "has left step 41, as if all gradients were reduced"),
    (other(3), "has all gradients of step 41, but has not finished reducing them"),
    (RankState(3), "does not answer"),
    (RankState(3, WHO, alive="running"), "does not answer: its Python threads don't run (process 17 on node1)"),
    (RankState(3, WHO, alive="gone"), "is dead: its process is gone (process 17 on node1)"),
    (RankState(3, WHO, alive="stopped"), "is stopped, by a signal or a debugger (process 17 on node1)"),
    (RankState(3, WHO, left="it has ended", alive="gone"), "left the training (process 17 on node1): it has ended"),
]


@pytest.mark.parametrize(("culprit", "words"), CASES)
def test_the_rank_that_holds_up_the_others_is_named(culprit, words):
    states = [waits(0), waits(1, waited_s=5.0), waits(2, bucket=6), culprit]
    finding = diagnose(states)
    assert finding.headline.startswith("rank 3 ") and words in finding.headline
    assert finding.headline.endswith("; ranks 0-2 have waited 31.2 s")
    shows_line = culprit.stack[:1] == [TRAIN] and not culprit.calls
    assert ("it is at train.py:88 in load" in finding.headline) == shows_line
    assert [c.rank for c in finding.culprits] == [3] and finding.waiting == [0, 1, 2]
    assert finding.waits_for == "the reduction of bucket 5 of 9 (step 41)"
    through_json = [RankState.from_json(json.loads(json.dumps(asdict(state)))) for state in states]
    assert through_json == states and diagnose(through_json) == finding


def test_many_missing_ranks_are_abbreviated_and_none_is_admitted():
    headline = diagnose([waits(0), *(RankState(rank) for rank in range(1, 9))]).headline
    assert headline.endswith(
        "; rank 4 does not answer; ranks 5-8 likewise hold up the others; rank 0 has waited 31.2 s"
    )
    assert diagnose([waits(0), waits(1, bucket=6)]).headline.startswith(
        "ranks 0 and 1 have waited 31.2 s for the reduction of bucket 5 of 9 (step 41), and no rank is known"
    )
    texts = [ranks_text(ranks) for ranks in ([3], [0, 1, 2, 5], [0, 1, 3, 5])]
    assert texts == ["rank 3", "ranks 0-2 and 5", "ranks 0, 1, 3 and 5"]


def test_a_report_is_written_as_text_and_json(tmp_path, monkeypatch):
    monkeypatch.setenv(diagnosis.FOLDER_ENV, str(tmp_path / "new"))
    below = [Frame("/home/me/data.py", 3, "read", "user"), Frame("/usr/lib/socket.py", 1, "recv", "python")]
    states = [waits(0), other(1, armed=True, missing={5: ["a"]}, stack=[TRAIN, *below])]
    finding = diagnose(states)
    path = diagnosis.write_report(finding, states, 0)
    content = json.loads(path.read_text())
    assert content.items() >= json.loads(json.dumps(asdict(finding))).items() and content["written_by"] == 0
    assert [RankState.from_json(values) for values in content["ranks"]] == states
    lines = diagnosis.report_text(finding, states, path).splitlines()
    where = ["    /home/me/train.py:88 in load", "    /home/me/data.py:3 in read"]
    assert lines[:4] == [f"torchddp hang report: {finding.headline}", "  rank 1: process 17 on node1", *where]
    assert lines[-1] == f"  full report: {path}"
    (tmp_path / "file").touch()
    monkeypatch.setenv(diagnosis.FOLDER_ENV, str(tmp_path / "file" / "no folder"))
    assert diagnosis.write_report(finding, states, 0) is None
    assert "full report" not in diagnosis.report_text(finding, states, None)
    monkeypatch.delenv(diagnosis.FOLDER_ENV)
    monkeypatch.setattr(diagnosis.tempfile, "gettempdir", mock.Mock(side_effect=FileNotFoundError))  # its disk is full
    assert diagnosis.write_report(finding, states, 0) is None


def test_a_process_is_seen_as_running_stopped_or_gone():
    assert look_up(process_identity()) == "running"
    child = subprocess.Popen(["sleep", "60"])
    who = {**process_identity(), "pid": child.pid, "started": _stat(child.pid)[1]}
    try:
        assert look_up(who) == "running"
        child.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: look_up(who) == "stopped")
        assert look_up({**who, "kernel": "another"}) is None
        assert look_up({**who, "started": who["started"] + 1}) == "gone"
    finally:
        child.kill()
    assert wait_until(lambda: look_up(who) == "gone")  # also as a zombie
    child.wait()
    assert look_up(who) == "gone" and look_up(None) is None


def test_a_process_whose_name_ends_within_a_character_runs_and_ends_quietly():
    """The kernel keeps 15 bytes of a script's name."""
    code = (
        "import ctypes; ctypes.CDLL(None).prctl(15, 'моделирование.py'.encode())\n"
        "from torchddp.transport.waits import look_up, process_identity; print(look_up(process_identity()))"
    )
    done = python("-c", code)
    assert (done.stdout, done.stderr) == ("running\n", "")


def test_an_uncaught_exception_is_recorded_and_printed():
    """Once, also if a hook of the program calls the one that was there before it."""
    code = (  # only this module, without the package
        "import atexit, sys, rank_state as s; s.note_uncaught(); noting = sys.excepthook\n"
        "sys.excepthook = lambda *error: noting(*error); s.note_uncaught()\n"
        "atexit.register(lambda: print(s.last_exception(1)['type'], s.last_exception(1)['where']))\n"
        "raise ValueError('seen')"
    )
    done = python("-c", code, cwd=Path(rank_state.__file__).parent)
    assert done.stdout == "ValueError the program\n" and done.returncode == 1
    assert done.stderr.count("ValueError: seen") == 1


def test_invalid_stall_limits_are_refused(monkeypatch):
    """tests/fault/test_bad_input.py tests those of the option."""
    monkeypatch.delenv(checks.STALL_ENV, raising=False)
    assert Checks().stall_limit_s(1800) == 60 and Checks(stall_report=29.5).stall_limit_s(30) == 29.5
    for text, words in (
        ("-1", "must hold seconds.*got '-1'"),
        ("nan", "must hold seconds.*got 'nan'"),
        ("31", "is 31 s, but a reduction fails after 30 s"),
    ):
        monkeypatch.setenv(checks.STALL_ENV, text)
        with pytest.raises(ValueError, match=f"TORCHDDP_STALL_REPORT_S {words}"):
            Checks().stall_limit_s(30)
    with pytest.raises(TypeError, match="stall_report=.* must be a number"):
        options_of(checks=Checks(stall_report=True))


BUSY = [Frame("/home/me/save.py", 20, "write", "user")]


def in_call(rank, function, line, **more):
    return RankState(rank, WHO, phase="no model", calls=[call(function, line, **more)], thread=1)


def absent(rank, **more):
    return RankState(rank, WHO, phase="no model", stack=BUSY, thread=1, **more)


def test_ranks_in_different_calls_are_all_named():
    finding = diagnose([*(in_call(rank, "barrier", 33) for rank in range(3)), in_call(3, "all_reduce", 120)])
    assert finding.headline == (
        "rank 3 waits in all_reduce at train.py:120, ranks 0-2 wait in barrier at train.py:33; "
        "the longest wait is 61.2 s"
    )
    assert [culprit.rank for culprit in finding.culprits] == [3] and finding.waiting == [0, 1, 2, 3]
    assert finding.waits_for == "barrier at train.py:33"
    # Without a majority nobody knows who is wrong.
    finding = diagnose([in_call(0, "barrier", 33), in_call(1, "all_reduce", 120)])
    assert [culprit.rank for culprit in finding.culprits] == [0, 1]


def test_a_rank_outside_the_collective_is_named():
    for state, said in (
        (absent(3), "rank 3 is at save.py:20 in write"),
        (RankState(3, WHO, phase="no model"), "rank 3 is elsewhere: its training thread has ended"),
        (RankState(3, WHO, alive="gone"), "rank 3 is dead: its process is gone (process 17 on node1)"),
        (RankState(3), "rank 3 does not answer"),
        (
            absent(3, exception={"type": "ValueError", "message": "boom", "where": "handled", "age_s": 0.0}),
            "rank 3 is at save.py:20 in write; it is handling ValueError: boom",
        ),
    ):
        finding = diagnose([*(in_call(rank, "barrier", 33) for rank in range(3)), state])
        assert finding.headline == f"ranks 0-2 wait in barrier at train.py:33, {said}; the longest wait is 61.2 s"
        assert [culprit.rank for culprit in finding.culprits] == [3]
    headline = diagnose([in_call(0, "barrier", 33), absent(1), absent(2), RankState(3), RankState(4)]).headline
    assert "ranks 1 and 2 are at save.py:20 in write, ranks 3 and 4 do not answer; " in headline


def test_waits_without_a_missing_rank_in_other_threads_and_on_other_groups():
    headline = diagnose([in_call(rank, "all_reduce", 5 + rank) for rank in range(2)]).headline
    assert headline.startswith(
        "rank 0 waits in all_reduce at train.py:5, rank 1 waits in all_reduce at train.py:6: no "
    )
    # The training thread's call comes first.
    both = RankState(0, WHO, phase="no model", calls=[call("recv", 8, thread=2), call("barrier", 33)], thread=1)
    assert "ranks 0 and 1 wait in barrier" in diagnose([both, in_call(1, "barrier", 33)]).headline
    # Only the group's members are waited for.
    finding = diagnose([absent(0), in_call(1, "barrier", 12, ranks=(1, 3)), absent(2), absent(3)])
    assert finding.headline.startswith(
        'rank 1 waits in barrier at train.py:12 (group "tp" of ranks 1 and 3), rank 3 is at save.py:20 in write; '
    )
    assert [culprit.rank for culprit in finding.culprits] == [3]


def test_the_state_of_a_rank_in_a_call_goes_through_json_and_moves():
    before = in_call(0, "barrier", 33)
    assert RankState.from_json(json.loads(json.dumps(asdict(before)))) == before
    assert not before.has_moved(in_call(0, "barrier", 33, waited_s=70.0)) and before.has_moved(absent(0))
    assert before.has_moved(in_call(0, "barrier", 34))
