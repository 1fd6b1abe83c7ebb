"""The watcher thread, the board of ranks' values, calls with a time limit, and which call a thread is in."""

import inspect
import json
import os
import pickle
import queue
import re
import subprocess
import sys
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.harness import run_ranks
from tests.programs import python
from tests.unit.helpers import wait_until
from torchddp import PeerFailedError, TransportError
from torchddp.diagnose.collectives import CallWatch
from torchddp.diagnose.fail_together import is_consequence
from torchddp.transport.store import Board
from torchddp.transport.worker import BoundedCalls, Task, _Watcher, watch


def test_a_failing_task_stops_without_affecting_others(caplog):
    polled: list[str] = []
    failing = watch(mock.Mock(side_effect=ValueError("no such thing")), 0.01)
    other = watch(lambda: polled.append(threading.current_thread().name), 0.01)
    assert wait_until(lambda: failing.closed)
    count = len(polled)
    assert wait_until(lambda: len(polled) > count + 2)
    other.close()
    later: list[int] = []  # of the same thread: what it polls next
    third = watch(lambda: later.append(len(polled)), 0.01)
    assert wait_until(lambda: len(later) > 3)
    third.close()
    assert len(set(later[1:])) == 1 and set(polled) == {"torchddp-watcher"}  # it polls until it is closed
    assert "no such thing" in caplog.text


def test_a_forked_child_has_its_own_watcher():
    polled: list[int] = []
    task = watch(lambda: polled.append(os.getpid()), 0.01)
    assert wait_until(lambda: polled)

    def work(rank):
        of_parent = len(polled)
        own: list[int] = []
        mine = watch(lambda: own.append(os.getpid()), 0.01)
        assert wait_until(lambda: own)
        mine.close()
        return len(polled) - of_parent, own[0] == os.getpid()

    assert run_ranks(work, 2) == [(0, True)] * 2
    task.close()


def test_a_watcher_whose_thread_could_not_start_ends():
    watcher = _Watcher()
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        pytest.raises(RuntimeError, watcher.add, Task(lambda: None, 1.0)).match("can't start new thread")
    assert watcher.end(1.0)


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_ranks_read_posted_values_and_one_rank_claims_a_key(world_size):
    def work(rank):
        board, other = Board(None, "test"), Board(None, "test")
        assert board.read("nothing") is None
        board.post_own("state", {"rank": rank})
        dist.barrier()
        claims = board.claim("report")
        assert other.read_of_ranks("state") == [None] * dist.get_world_size()
        return board.read_of_ranks("state"), claims

    states, claims = zip(*run_ranks(work, world_size), strict=True)
    assert list(states) == [[{"rank": rank} for rank in range(world_size)]] * world_size
    assert sum(claims) == 1


def test_a_lost_store_is_not_called_again(capfd):
    """torch prints a page for each call over a connection that is gone."""
    program = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        store = dist.TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        board = Board(None, "test")
        board.post("key", 1)
        host.kill()
    with pytest.raises(dist.DistNetworkError) as lost:
        board.read("key")
    why = re.escape(str(lost.value).partition("\n")[0])
    printed = capfd.readouterr().err.count("TCPStore.cpp")
    for _ in range(3):
        with pytest.raises(RuntimeError, match=f"^no connection to the store .*: {why}$"):
            board.read("key")
    dist.destroy_process_group()
    assert (printed, capfd.readouterr().err) == (1, "")


def test_a_call_that_does_not_return_times_out():
    calls = BoundedCalls(3.0)
    assert calls.call(lambda: threading.current_thread().name) == "torchddp-store"
    with pytest.raises(KeyError):
        calls.call(lambda: {}["nothing"])
    goes_on = threading.Event()
    with pytest.raises(RuntimeError, match=r"no answer within 3 s"):
        calls.call(goes_on.wait)
    with pytest.raises(RuntimeError, match=r"a call has not returned after 3 s"):
        calls.call(lambda: 1)
    threading.Timer(1.0, goes_on.set).start()
    assert calls.call(lambda: 2, patience_s=60.0) == 2
    assert calls.call(lambda: 1) == 1


def test_a_store_that_does_not_answer_costs_its_callers_one_wait_together():
    calls, goes_on = BoundedCalls(2.0), threading.Event()
    calls.start(goes_on.wait)
    begun, errors = time.monotonic(), []

    def call():
        with pytest.raises(RuntimeError) as raised:
            calls.call(lambda: 1)
        errors.append(str(raised.value))

    threads = [threading.Thread(target=call) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(5):
        call()
    assert time.monotonic() - begun < 2 * 2.0 and len(errors) == 10
    goes_on.set()
    calls.end("it was destroyed")
    with pytest.raises(RuntimeError, match="has not returned|was destroyed"):
        calls.call(lambda: 1)


def test_the_call_thread_ends_with_its_owner():
    calls = BoundedCalls(60.0)
    thread = calls.call(threading.current_thread)
    del calls
    assert wait_until(lambda: not thread.is_alive())


# The interpreter's end takes long.
ENDING = """
import datetime, functools, hashlib, time
import torch, torch.distributed as dist
from torchddp.transport.worker import BoundedCalls

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1.5)

slow = Slow()
"""
# A call that would fail meanwhile.
CALLING = f"""{ENDING}
store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=0.5))
calls = BoundedCalls(5.0)
answer = calls.start(functools.partial(store.get, "never"))
"""
# gloo's thread would take the interpreter's lock meanwhile, as when it drops a tensor.
DROPPING = f"""{ENDING}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
time.sleep(0.5)  # on a busy machine gloo's threads, which are found by their name, give it to themselves late
data = bytes(300_000_000)
work = dist.all_reduce(torch.ones(1), async_op=True)
future = work.get_future().then(lambda _: hashlib.sha256(data) and None)
"""


AT_EXIT = {
    "kept": CALLING,
    "gone": CALLING + "del calls\n",
    "late": CALLING.replace("0.5", "2.7"),
    "gloo": DROPPING,
}


@pytest.mark.rest_is_thorough("kept", "late", "gloo")
@pytest.mark.parametrize("case", AT_EXIT)
def test_a_thread_that_runs_at_exit_does_not_abort_the_process(case):
    done = python("-c", AT_EXIT[case])
    assert done.returncode == 0 and "terminate called" not in done.stderr, done.stderr


def test_a_remote_exception_keeps_its_details_when_serialized():
    def told(error):
        try:
            raise error
        except BaseException as caught:
            return PeerFailedError.of(caught, 3)

    posted = json.loads(json.dumps(told(ValueError("no such file")).args))
    for error in (PeerFailedError(*posted), pickle.loads(pickle.dumps(told(ValueError("no such file"))))):
        assert str(error) == "rank 3 failed: ValueError: no such file"
        assert (error.rank, error.exception_type, error.message, error.step) == (3, "ValueError", "no such file", 0)
        assert "test_watch.py" in error.remote_traceback
        assert type(error) is PeerFailedError and isinstance(error, TransportError)
    assert str(PeerFailedError(1, "KeyError", "'x'", 7, "")) == "rank 1 failed after step 7: KeyError: 'x'"
    assert len(json.dumps(told(ValueError("x" * 1_000_000)).args)) < 20_000


def test_exceptions_caused_by_other_ranks_are_recognized():
    for error, expected in (
        (TransportError("rank 0, step 3: bucket 1"), True),
        (PeerFailedError(1, "ValueError", "x", 0, ""), True),
        (dist.DistNetworkError("failed to recv"), True),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (RuntimeError("Int8 on rank 0, step 3, bucket 1 (w): TransportError: rank 2 gave up"), True),
        (RuntimeError("CUDA error: out of memory"), False),
        (ValueError("gloo"), False),
        (KeyboardInterrupt(), False),
    ):
        assert is_consequence(error) is expected, error


# A function of torch's file, which returns when the test lets it.
functions = {}
exec(compile("def barrier(wait, tensor, group=None): return wait()", distributed_c10d.__file__, "exec"), functions)
barrier = functions["barrier"]


RETURNING = """
import gc, threading, time
from torchddp.diagnose.collectives import CallWatch

class Garbage:
    finalized = 0
    def __init__(self):
        self.cycle = self
    def __del__(self):
        if threading.current_thread() is threading.main_thread():
            Garbage.finalized += 1
            if Garbage.finalized % 40 == 0:
                time.sleep(0.001)

def descend(depth):
    if depth:
        return descend(depth - 1)
    for _ in range(20):
        Garbage()
    time.sleep(0.0003)

def work():
    while True:
        descend(900)
        descend(30)

# Deep in code that isn't the user's, so that the whole stack is walked.
descend.__code__ = descend.__code__.replace(co_filename=threading.__file__)
gc.set_threshold(100)
threading.Thread(target=work, daemon=True).start()
watch, until_s = CallWatch(), time.monotonic() + 4
while time.monotonic() < until_s:
    assert watch.look(limit_s=1) == []
    time.sleep(0.0001)
"""


class Loop:
    """A thread that calls `barrier` again and again, from one line."""

    def __init__(self):
        self._go_on = queue.SimpleQueue()
        self._tensor = lambda: None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.tensor = self._entered(None)

    def _run(self):
        while barrier(self._go_on.get, self._make()):
            pass

    def _make(self):
        tensor = torch.ones(2)
        self._tensor = weakref.ref(tensor)
        return tensor

    def _entered(self, before):
        assert wait_until(lambda: self._tensor is not before and CallWatch()._look())
        return self._tensor

    def next(self):
        """The tensor of the call that has ended."""
        ended = self.tensor
        self._go_on.put(True)
        self.tensor = self._entered(ended)
        return ended

    def end(self):
        self._go_on.put(False)
        self._thread.join(60)


@pytest.fixture
def loop():
    made = Loop()
    yield made
    made.end()


def test_a_call_is_certain_if_its_frame_is_found_again(loop):
    watch = CallWatch()
    (call,) = watch.look(limit_s=0)
    assert not call.is_certain
    assert watch.look(limit_s=0) == [call] and call.is_certain
    assert watch.look(limit_s=1000) == [call]
    loop.next()  # from the same line
    (following,) = watch.look(limit_s=0)
    assert following.key != call.key and not following.is_certain
    other = CallWatch()
    for _ in range(3):
        (call,) = other.look(limit_s=1000)
    assert not call.is_certain


def test_what_is_known_of_a_call(loop):
    watch = CallWatch()
    (state,) = watch.states()
    assert (state.function, state.file, state.group, state.ranks) == ("barrier", __file__, "", [])
    assert state.line == inspect.getsourcelines(Loop._run)[1] + 1
    assert [other.identity for other in watch.states()] == [state.identity]
    loop.end()
    assert watch.states() == []


def test_tensors_are_only_kept_by_calls_that_seem_to_last(loop):
    watch = CallWatch()
    watch.look(limit_s=1000)
    watch.states()
    assert loop.next()() is None
    watch.look(limit_s=0)
    tensor = loop.next()
    assert tensor() is not None
    watch.look(limit_s=0)
    assert tensor() is None


@pytest.mark.slow
def test_looking_at_a_running_thread_is_safe():
    # While its frames are looked at, finalizers let the thread return from them, so that its stack is unmapped.
    done = python("-c", RETURNING)
    assert done.returncode == 0, done.stderr
