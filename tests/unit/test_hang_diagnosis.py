"""Hang reports: the diagnosis of ranks' states, its text and JSON, and how states are collected."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.helpers import wait_until
from torchddp.ddp import options
from torchddp.diagnose import diagnosis, rank_state
from torchddp.diagnose.call_diagnosis import ordinal
from torchddp.diagnose.diagnosis import diagnose, ranks_text
from torchddp.diagnose.rank_state import CallState, Frame, GroupCalls, RankState

WHO = {"host": "node1", "pid": 17, "kernel": "", "started": 0}
TRAIN = Frame("/home/me/train.py", 88, "load", "user")
IN_BARRIER = [
    Frame("/home/me/train.py", 88, "validate", "user"),
    Frame("/x/torch/distributed/c10d_logger.py", 83, "wrapper", "torch"),
    Frame("/x/torch/distributed/distributed_c10d.py", 4, "barrier", "torch"),
]
MODEL = ["'a.weight' float32[2, 3]", "'a.bias' float32[2]"]
BOOM = {"type": "ValueError", "message": "boom\nat line 3", "where": "forward", "stack": [], "age_s": 1.0}


def waits(rank, step=41, bucket=5, waited_s=31.2, **more):
    known = {"waits_for": "the reduction", "num_buckets": 9, "digest": "d", "parameters": MODEL, "armed": True}
    return RankState(rank, WHO, step=step, phase="waiting", bucket=bucket, waited_s=waited_s, **known, **more)


def other(rank, phase="backward", step=41, **more):
    values = {"num_buckets": 9, "digest": "d", "parameters": MODEL, "stack": [TRAIN], **more}
    return RankState(rank, WHO, step=step, phase=phase, **values)


def missing(parameters, phase="backward", **more):
    return other(3, phase, armed=True, missing=parameters, **more)


# A rank's state, and words of its diagnosis.
CASES = [
    (
        missing({5: ["a.weight"], 6: ["b"]}, backward="failed", backward_error="ValueError: boom\nfoo"),
        "has not produced a.weight (bucket 5 of 9, step 41); it left backward with ValueError: boom",
    ),
    (
        missing({6: ["a", "b", "c", "d", "e"]}, backward="ended"),
        "has not produced a, b, c and 2 more (bucket 6 of 9, step 41); its backward ended without a, b, c and 2 more",
    ),
    (missing({5: ["a"]}, backward="running"), "has not produced a (bucket 5 of 9, step 41)"),
    (
        missing({5: ["a"]}, phase="forward", stack=IN_BARRIER),
        "its backward has produced none yet; it is in barrier, called from train.py:88",
    ),
    (other(3, "forward", exception=BOOM), "the forward of step 41; it left forward with ValueError: boom"),
    (other(3, "forward", exception={**BOOM, "age_s": 99.0}), "has not ended the forward of step 41"),
    (
        other(3, "idle", step=40, exception={**BOOM, "where": "handled"}),
        "which it has finished: it is late, has skipped a batch, or has none left; it handles ValueError: boom",
    ),
    (
        other(3, "forward", step=40),
        "is at step 40 (ranks 0-2 are at 41), in forward: it is late, or has begun one batch fewer",
    ),
    (other(3, "forward", step=42), "is at step 42 (ranks 0-2 are at 41): it runs one more batch"),
    (waits(3, step=40, bucket=0), "and waits there for the reduction of bucket 0 of 9 (step 40)"),
    (
        RankState(3, WHO, step=41, phase="waiting", waits_for="the broadcast of buffers", digest="d"),
        "waits for the broadcast of buffers (step 41) instead",
    ),
    (other(3, "idle", error="rank 3: no memory\nlook"), "has left step 41, which failed there: rank 3: no memory"),
    (other(3, "idle"), "has left step 41, as if all gradients were reduced"),
    (other(3), "has all gradients of step 41, but has not finished reducing them"),
    (RankState(3), "does not answer"),
    (RankState(3, WHO, alive="running"), "does not answer: its Python threads don't run (process 17 on node1)"),
    (RankState(3, WHO, alive="gone"), "is dead: its process is gone (process 17 on node1)"),
    (RankState(3, WHO, alive="stopped"), "is stopped, by a signal or a debugger (process 17 on node1)"),
    (RankState(3, WHO, left="it has ended", alive="gone"), "left the training (process 17 on node1): it has ended"),
    (
        other(3, digest="e", parameters=[MODEL[0], "'a.bias' float32[3]"]),
        "wraps a different model than rank 0: its parameter 1 is 'a.bias' float32[3], not 'a.bias' float32[2]",
    ),
    (
        other(3, digest="e", parameters=MODEL[:1]),
        "wraps a different model than rank 0: 1 parameters, not 2; it lacks 'a.bias' float32[2]",
    ),
    (other(3, digest="e", parameters=None), "wraps a different model than rank 0"),
]


@pytest.mark.parametrize(("culprit", "words"), CASES)
def test_the_rank_that_holds_up_the_others_is_named(culprit, words):
    states = [waits(0), waits(1, waited_s=5.0), waits(2, bucket=6), culprit]
    finding = diagnose(states)
    assert finding.headline.startswith("rank 3 ") and words in finding.headline
    assert finding.headline.endswith("; ranks 0-2 have waited 31.2 s")
    assert ("it is at train.py:88 in load" in finding.headline) == (culprit.stack == [TRAIN] and culprit.digest == "d")
    assert [c.rank for c in finding.culprits] == [3] and finding.waiting == [0, 1, 2]
    assert finding.waits_for == "the reduction of bucket 5 of 9 (step 41)"
    through_json = [RankState.from_json(json.loads(json.dumps(state.to_json()))) for state in states]
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
    states = [waits(0), other(1, armed=True, missing={5: ["a"]}, stack=[TRAIN, *IN_BARRIER])]
    finding = diagnose(states)
    content = diagnosis.report_json(finding, states, 0)
    path = diagnosis.write_report(content)
    assert json.loads(path.read_text()) == json.loads(json.dumps(content))
    lines = diagnosis.report_text(finding, states, path).splitlines()
    where = [f"    /home/me/train.py:88 in {function}" for function in ("load", "validate")]
    assert lines[:4] == [f"torchddp hang report: {finding.headline}", "  rank 1: process 17 on node1", *where]
    assert lines[-1] == f"  full report: {path}"
    (tmp_path / "file").touch()
    monkeypatch.setenv(diagnosis.FOLDER_ENV, str(tmp_path / "file" / "no folder"))
    assert diagnosis.write_report(content) is None
    assert "full report" not in diagnosis.report_text(finding, states, None)


def test_a_process_is_seen_as_running_stopped_or_gone():
    assert rank_state.look_up(rank_state.process_identity()) == "running"
    child = subprocess.Popen(["sleep", "60"])
    who = {**rank_state.process_identity(), "pid": child.pid, "started": rank_state._stat(child.pid)[1]}
    try:
        assert rank_state.look_up(who) == "running"
        child.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: rank_state.look_up(who) == "stopped")
        assert rank_state.look_up({**who, "kernel": "another"}) is None
        assert rank_state.look_up({**who, "started": who["started"] + 1}) == "gone"
    finally:
        child.kill()
    assert wait_until(lambda: rank_state.look_up(who) == "gone")  # also as a zombie
    child.wait()
    assert rank_state.look_up(who) == "gone" and rank_state.look_up(None) is None


def test_the_collective_is_found_in_a_stack():
    assert rank_state.collective_in(IN_BARRIER) == "barrier, called from train.py:88"
    assert rank_state.collective_in([TRAIN]) is None and rank_state.collective_in([*IN_BARRIER, TRAIN]) is None


def test_an_uncaught_exception_is_recorded_and_printed():
    code = (  # only this module, without the package
        "import atexit, rank_state as s; s.note_uncaught(); s.note_uncaught()\n"
        "atexit.register(lambda: print(s.last_exception(1)['type'], s.last_exception(1)['where']))\n"
        "raise ValueError('seen')"
    )
    folder = Path(rank_state.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.stdout == "ValueError the program\n" and "ValueError: seen" in done.stderr and done.returncode == 1


def test_invalid_stall_limits_are_refused(monkeypatch):
    """tests/fault/test_hang_reports.py tests other limits and their precedence."""
    monkeypatch.delenv(options.STALL_ENV, raising=False)
    assert options.stall_limit_s(None, 1800) == 60 and options.stall_limit_s(29.5, 30) == 29.5
    for text, words in (
        ("-1", "must hold seconds.*got '-1'"),
        ("nan", "must hold seconds.*got 'nan'"),
        ("31", "is 31 s, but a reduction fails after 30 s"),
    ):
        monkeypatch.setenv(options.STALL_ENV, text)
        with pytest.raises(ValueError, match=f"TORCHDDP_STALL_REPORT_S {words}"):
            options.stall_limit_s(None, 30)
    with pytest.raises(TypeError, match="stall_report_s must be a number"):
        options.DDPOptions(stall_report_s=True)


BUSY = [Frame("/home/me/save.py", 20, "write", "user")]


def in_call(rank, function, line, number=4, ranks=(0, 1, 2, 3), past=(), group="0", waited_s=61.2, **more):
    title = 'group "default"' if group == "0" else f'group "{group}" of ranks 1 and 3'
    rows = [*past, [number, function, "/home/me/train.py", line, more.get("shape", "")]] if number else list(past)
    call = CallState(
        function, "/home/me/train.py", line, group=group, number=number, waited_s=waited_s, thread=1, **more
    )
    groups = {group: GroupCalls(title, list(ranks), number, rows)}
    return RankState(rank, WHO, phase="no model", calls=[call], groups=groups, thread=1)


def absent(rank, **more):
    past = [[3, "all_reduce", "/home/me/train.py", 31, "float32[4]"]]
    groups = {"0": GroupCalls('group "default"', [0, 1, 2, 3], 3, past)}
    return RankState(rank, WHO, phase="no model", stack=BUSY, groups=groups, thread=1, **more)


def test_the_first_call_that_differs_between_ranks_is_named():
    finding = diagnose([*(in_call(rank, "barrier", 33) for rank in range(3)), in_call(3, "all_reduce", 120)])
    assert finding.headline == (
        'rank 3 waits in all_reduce at train.py:120 (4th on group "default"), ranks 0-2 in barrier at train.py:33: '
        "they differ from call 4 on; the longest wait is 61.2 s"
    )
    assert [culprit.rank for culprit in finding.culprits] == [3] and finding.waiting == [0, 1, 2, 3]
    assert finding.waits_for == 'barrier (4th on group "default")'
    # Ranks that called different collectives are reported even if those calls returned.
    one, other = (
        [[2, name, "/home/me/train.py", at, ""], [3, "barrier", "f.py", 1, ""]]
        for name, at in (("all_gather", 7), ("gather", 9))
    )
    finding = diagnose([in_call(0, "barrier", 33, past=one), in_call(1, "all_reduce", 34, past=other)])
    assert "they differ from call 2 on of group" in finding.headline
    assert "(rank 0 called all_gather at train.py:7, rank 1 called gather at train.py:9)" in finding.headline
    past = [[3, "all_reduce", "/home/me/train.py", 31, ""]]
    elsewhere = in_call(3, "barrier", 12, number=1, ranks=(1, 3), group="pair")
    elsewhere.groups["0"] = GroupCalls('group "default"', [0, 1, 2, 3], 3, past)
    states = [in_call(0, "barrier", 33), in_call(1, "broadcast", 35), in_call(2, "barrier", 33), elsewhere]
    headline = diagnose(states).headline
    assert 'they differ from call 4 on of group "default" (ranks 0 and 2 called barrier at train.py:33, ' in headline
    assert "rank 1 called broadcast at train.py:35)" in headline


def test_a_rank_outside_the_collective_is_named():
    for state, said in (
        (absent(3), 'rank 3 is at save.py:20 in write; its last call on group "default" was the 3rd, all_reduce at '),
        (RankState(3, WHO, alive="gone"), "rank 3 is dead: its process is gone (process 17 on node1)"),
        (RankState(3), "rank 3 does not answer"),
        (
            absent(3, exception={"type": "ValueError", "message": "boom", "where": "handled", "age_s": 0.0}),
            "rank 3 is at save.py:20 in write; it handles ValueError: boom",
        ),
    ):
        finding = diagnose([*(in_call(rank, "barrier", 33) for rank in range(3)), state])
        assert finding.headline.startswith('ranks 0-2 wait in barrier at train.py:33 (4th on group "default"), ' + said)
        assert "differ" not in finding.headline and [culprit.rank for culprit in finding.culprits] == [3], said


def test_shapes_and_roots_are_shown_if_they_differ():
    shapes = diagnose([in_call(0, "all_reduce", 5, shape="float32[4]"), in_call(1, "all_reduce", 5, shape="int64[2]")])
    assert "all_reduce of float32[4] at" in shapes.headline and "all_reduce of int64[2] at" in shapes.headline
    assert "they differ from call 4 on" in shapes.headline
    roots = [in_call(rank, "broadcast", 5, peers=[("from", rank)]) for rank in range(2)]
    assert "in broadcast from rank 1 at train.py:5" in diagnose(roots).headline


def test_waits_without_a_missing_rank_on_other_groups_and_for_messages_are_described():
    same = [in_call(rank, "all_reduce", 5 + rank, shape="float32[4]", ranks=(0, 1)) for rank in range(2)]
    headline = diagnose(same).headline
    assert "no rank is known to be missing" in headline and "float32" not in headline and "differ" not in headline
    ordinals = "1st 2nd 3rd 4th 11th 12th 13th 21st 102nd 111th".split()
    assert [ordinal(int(text[:-2])) for text in ordinals] == ordinals
    states = [
        in_call(0, "barrier", 33),
        in_call(1, "barrier", 12, number=2, group="tp", ranks=(1, 3)),
        in_call(2, "barrier", 33),
        in_call(3, "recv", 8, number=0, peers=[("from", 1)]),
    ]
    headline = diagnose(states).headline
    assert 'rank 1 in barrier at train.py:12 (2nd on group "tp" of ranks 1 and 3)' in headline
    assert 'rank 3 waits in recv from rank 1 at train.py:8 (group "default")' in headline
    assert 'ranks 0 and 2 in barrier at train.py:33 (4th on group "default")' in headline
