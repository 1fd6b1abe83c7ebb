"""Which of torch.distributed's functions a thread is in, told from its stack."""

import inspect
import queue
import sys
import threading
import weakref

import pytest
import torch
from torch.distributed import distributed_c10d

from tests.unit.helpers import wait_until
from torchddp.diagnose import collectives
from torchddp.diagnose.collectives import CallWatch

# A function of torch's file, which returns when the test lets it.
functions = {}
exec(compile("def barrier(wait, tensor, group=None): return wait()", distributed_c10d.__file__, "exec"), functions)
barrier = functions["barrier"]


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
        stacks = sys._current_frames
        assert wait_until(lambda: self._tensor is not before and collectives._function_on(stacks()[self._thread.ident]))
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
