"""Detects mismatched forwards and backwards: no_sync() around only one of them, or a forward without a backward."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel.distributed import _find_tensors

from torchddp.ddp.session import ReducerSession
from torchddp.diagnose.telling import Teller, place
from torchddp.errors import user_line

_KEPT = 64  # forwards whose lines are remembered
_MOST_OUTPUTS = 64  # tensors; a forward with more outputs is not tracked

REDUCED = "reduced inside no_sync()"
UNREDUCED = "backward after no_sync()"
LEFT = "forward without backward"


@dataclass(slots=True)
class _Forward:
    """A forward that a backward should follow: synchronized in training, or under no_sync()."""

    number: int
    where: tuple[str, int]
    synchronized: bool
    finished: int  # number of synchronized steps when it ended
    finished_by_next: int | None = None  # the same, when the next one began


@dataclass(frozen=True)
class _Pending:
    """The last forward inside a no_sync(), if no backward had followed it when the context ended."""

    forward: _Forward
    finished: int
    versions: int


class ForwardTraps:
    """Compares what the outputs of forwards report (`ForwardWatch` in C++) with the extent of no_sync()."""

    def __init__(self, session: ReducerSession, teller: Teller) -> None:
        self._session, self._teller = session, teller
        self._module = weakref.ref(session.ddp.module)
        self._forwards: deque[_Forward] = deque(maxlen=_KEPT)
        self._last: _Forward | None = None
        self._count = 0
        self._seen_left = -1
        self._depth = 0  # of no_sync()
        self._count_outside = 0  # number of forwards when it began
        self._open: _Forward | None = None  # the forward that still awaited a backward when it began
        self._pending: _Pending | None = None

    def after_forward(self, output: Any) -> None:
        """Called after forwards with gradients only; `output` is what the program gets."""
        reducer, last = self._session.reducer, self._last
        finished = reducer.finished_steps
        if last is not None:
            if last.finished_by_next is None:
                last.finished_by_next = finished
            left, used = reducer.left_and_used_forward()
            if left != self._seen_left:
                self._seen_left = left
                self._look_at_left(left)
            if self._pending is not None:
                self._look_at_pending(self._pending, finished, used)
        synchronized = self._session.synchronizes
        if synchronized:
            module = self._module()
            if module is None or not module.training:
                return  # an evaluation does not get gradients
        elif self._depth == 0:
            return  # not through no_sync(): the code that set the flag may reset it before backward
        outputs = [output] if type(output) is torch.Tensor else list(_find_tensors(output))
        if len(outputs) <= _MOST_OUTPUTS:
            self._count += 1
            self._last = _Forward(self._count, user_line(), synchronized, finished)
            self._forwards.append(self._last)
            reducer.watch_forward(self._count, outputs)

    def on_no_sync(self, *, begins: bool) -> None:
        self._depth += 1 if begins else -1
        if self._depth == begins:  # the outermost
            (self._begin_no_sync if begins else self._end_no_sync)(self._session.reducer.finished_steps)

    def close(self) -> None:
        self._pending = None

    # --- no_sync() ---

    def _begin_no_sync(self, finished: int) -> None:
        self._count_outside = self._count
        last = self._last
        self._open = last if last is not None and last.synchronized and last.finished == finished else None

    def _end_no_sync(self, finished: int) -> None:
        outside, self._open = self._open, None
        if outside is not None and finished > outside.finished:
            self._teller.tell(
                REDUCED,
                f"Gradients were averaged inside no_sync() on rank {self._teller.rank}: the backward ran inside, but "
                f"the forward before it, at {place(outside.where)}, outside; no_sync() takes effect when forward is "
                "called. To leave gradients of this microbatch unreduced, put its forward inside too; otherwise, put "
                "the backward outside.",
                user_line(),
            )
        last = self._last
        if last is None or last.number == self._count_outside or self._teller.has_told(UNREDUCED):
            return
        if self._session.reducer.left_and_used_forward()[1] != last.number:
            self._pending = _Pending(last, finished, self._versions())

    def _look_at_pending(self, pending: _Pending, finished: int, used: int) -> None:
        if finished != pending.finished:
            self._pending = None  # any gradients it left have been averaged by now
        elif used == pending.forward.number and self._versions() != pending.versions:
            self._pending = None
            where = pending.forward.where
            self._teller.tell(
                UNREDUCED,
                f"Parameters were changed by gradients that were not averaged, on rank {self._teller.rank}: the "
                f"forward at {place(where)} was inside no_sync(), its backward outside; no_sync() takes effect "
                "when forward is called. Each rank has trained on its own. To average these gradients, put the forward "
                "outside too; if ranks should train on their own, put the backward inside too.",
                where,
            )

    def _versions(self) -> int:
        """Increases with every change of a parameter."""
        return sum(parameter._version for parameter in self._session.parameters)

    # --- forwards without a backward ---

    def _look_at_left(self, number: int) -> None:
        found = next((forward for forward in self._forwards if forward.number == number), None)
        # The program may use more than these outputs; then gradients arrived before the next forward.
        if found is None or not found.synchronized or found.finished != found.finished_by_next:
            return
        self._teller.tell(
            LEFT,
            f"No backward has followed the forward at {place(found.where)} on rank {self._teller.rank}: its outputs "
            "are gone (a loss was thrown away, or an exception was caught). Ranks must run the same backwards: if only "
            "some leave one out, the others wait for their gradients, or get those of another batch. Have all ranks "
            "skip a batch together, or run backward on loss * 0. Where only the outputs are wanted, run the forward "
            "under torch.no_grad() or in evaluation mode.",
            found.where,
        )
