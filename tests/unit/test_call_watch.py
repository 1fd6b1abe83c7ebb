"""Which of torch.distributed's functions a thread is in, told from its stack."""

import inspect
import queue
import threading
import weakref

import pytest
import torch
from torch.distributed import distributed_c10d

from tests.programs import python
from tests.unit.helpers import wait_until
from torchddp.diagnose.collectives import CallWatch

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


def test_looking_at_a_running_thread_is_safe():
    # While its frames are looked at, finalizers let the thread return from them, so that its stack is unmapped.
    done = python("-c", RETURNING)
    assert done.returncode == 0, done.stderr
