"""The diagnosis of ranks' collective calls in one sentence."""

import pytest

from torchddp.diagnose.call_diagnosis import ordinal
from torchddp.diagnose.diagnosis import diagnose
from torchddp.diagnose.rank_state import CallState, Frame, GroupCalls, RankState

WHO = {"host": "node1", "pid": 17, "kernel": "", "started": 0}
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


def test_one_rank_in_another_call():
    finding = diagnose([*(in_call(rank, "barrier", 33) for rank in range(3)), in_call(3, "all_reduce", 120)])
    assert finding.headline == (
        'rank 3 waits in all_reduce at train.py:120 (4th on group "default"), ranks 0-2 in barrier at train.py:33: '
        "they differ from call 4 on; the longest wait is 61.2 s"
    )
    assert [culprit.rank for culprit in finding.culprits] == [3] and finding.waiting == [0, 1, 2, 3]
    assert finding.waits_for == 'barrier (4th on group "default")'


def test_an_earlier_difference_is_shown():
    """An earlier call that returned on all ranks, although it differed between them, is reported."""
    one, other = (
        [[2, name, "/home/me/train.py", at, ""], [3, "barrier", "f.py", 1, ""]]
        for name, at in (("all_gather", 7), ("gather", 9))
    )
    finding = diagnose([in_call(0, "barrier", 33, past=one), in_call(1, "all_reduce", 34, past=other)])
    assert "they differ from call 2 on of group" in finding.headline
    assert "(rank 0 called all_gather at train.py:7, rank 1 called gather at train.py:9)" in finding.headline


def test_ranks_that_differ_are_reported_though_another_is_behind():
    past = [[3, "all_reduce", "/home/me/train.py", 31, ""]]
    elsewhere = in_call(3, "barrier", 12, number=1, ranks=(1, 3), group="pair")
    elsewhere.groups["0"] = GroupCalls('group "default"', [0, 1, 2, 3], 3, past)
    states = [in_call(0, "barrier", 33), in_call(1, "broadcast", 35), in_call(2, "barrier", 33), elsewhere]
    headline = diagnose(states).headline
    assert 'they differ from call 4 on of group "default" (ranks 0 and 2 called barrier at train.py:33, ' in headline
    assert "rank 1 called broadcast at train.py:35)" in headline


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (absent(3), 'rank 3 is at save.py:20 in write; its last call on group "default" was the 3rd, all_reduce at '),
        (RankState(3, WHO, alive="gone"), "rank 3 is dead: its process is gone (process 17 on node1)"),
        (RankState(3), "rank 3 does not answer"),
        (
            absent(3, exception={"type": "ValueError", "message": "boom", "where": "handled", "age_s": 0.0}),
            "rank 3 is at save.py:20 in write; it handles ValueError: boom",
        ),
    ],
)
def test_a_rank_that_is_in_no_call(state, said):
    finding = diagnose([*(in_call(rank, "barrier", 33) for rank in range(3)), state])
    assert finding.headline.startswith('ranks 0-2 wait in barrier at train.py:33 (4th on group "default"), ' + said)
    assert "differ" not in finding.headline and [culprit.rank for culprit in finding.culprits] == [3]


def test_shapes_and_roots_are_shown_if_they_differ():
    shapes = diagnose([in_call(0, "all_reduce", 5, shape="float32[4]"), in_call(1, "all_reduce", 5, shape="int64[2]")])
    assert "all_reduce of float32[4] at" in shapes.headline and "all_reduce of int64[2] at" in shapes.headline
    assert "they differ from call 4 on" in shapes.headline
    roots = [in_call(rank, "broadcast", 5, peers=[("from", rank)]) for rank in range(2)]
    assert "in broadcast from rank 1 at train.py:5" in diagnose(roots).headline


def test_no_rank_is_missing():
    same = [in_call(rank, "all_reduce", 5 + rank, shape="float32[4]", ranks=(0, 1)) for rank in range(2)]
    headline = diagnose(same).headline
    assert "no rank is known to be missing" in headline and "float32" not in headline and "differ" not in headline
    ordinals = "1st 2nd 3rd 4th 11th 12th 13th 21st 102nd 111th".split()
    assert [ordinal(int(text[:-2])) for text in ordinals] == ordinals


def test_other_groups_and_messages():
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
