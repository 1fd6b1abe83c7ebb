"""All ranks stop after the same step, when one of them is asked to.

Note [The last step]
~~~~~~~~~~~~~~~~~~~~
A check of a rank (`if stop:`) has a position: the number of steps that the ranks have finished together. A rank that
learns of a request publishes the position of its last check that said no, and from then on its checks wait for the
last step: the highest position that any rank has published. A check says yes at the first position after it. So a rank
never learns the last step too late: it can't pass it without the others, whose checks wait as long as it has
published nothing, and its watcher publishes even while its training thread waits for them in a collective. What a step
costs is a check, which reads a counter; nothing is sent until there is a request, which ranks look for in the store.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchddp import _C, _torch
from torchddp.composable.module import engines_in
from torchddp.ddp.module import DistributedDataParallel
from torchddp.durations import Duration, seconds
from torchddp.notices import tell
from torchddp.sync.microbatches import unwrapped
from torchddp.transport.store import Board, home_of
from torchddp.transport.waits import GONE, look_up, peers_of
from torchddp.transport.worker import Task, watch

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_caught: list[int] = []  # by this process now
_LOOK_S = 0.5
_SLOWEST_LOOK_S = 1.0
_SOON_S = 0.01  # while the ranks agree
_NOTHING_CHECKED = -1
_NEVER = 2**62


class Request(NamedTuple):
    """Who asked the ranks to stop, and why."""

    rank: int
    reason: str

    def __str__(self) -> str:
        return f"{self.reason} on rank {self.rank}"


class StopTogether:
    """Ends the training loops of all ranks after the same step, when any of them is asked to stop.

    Example:

        with torchddp.StopTogether(model) as stop:
            for batch in loader:
                loss_of(model(batch)).backward()
                optimizer.step()
                if stop:
                    save(...)
                    break

    SIGTERM, SIGUSR1 or :meth:`request` on any rank is such a request; ``if stop:`` is then true on all ranks after the
    same step, usually the current one or the next. Check at the same place of the loop on every rank; between
    microbatches, it stays false until the next synchronized step has ended. A check without a request reads counters;
    ranks look for requests in the store of the process group twice a second (less often beyond 64 ranks), on a
    thread. Under `join()`, steps in which a rank only took part count on that rank, too.

    A signal is noted even while the main thread is in C++ or another thread holds the interpreter's lock. A second one,
    more than two seconds later, does what it did before, as does the first after ``grace_s`` seconds without a step
    that ends. One that comes after the last check is a request to the next StopTogether of the process. Forked
    children, such as a DataLoader's workers, ignore the first signal, unless their parent sent it. It may be created on
    any thread. Handlers that are installed later replace its own.

    Not collective, but all ranks must create the same number of these, at the same places. Methods are thread-safe. It
    ends with its process group; a model that continues over another one needs a new StopTogether.

    Args:
        models: DistributedDataParallel, ShardedDataParallel, or modules after `replicate`, whose steps count together;
            ranks that train other models (pipeline stages) must take equally many steps between checks.
            None: each check counts as a step, so all ranks must check equally often. So it is in loops that hardly
            ever reduce gradients (model averaging), and for steps replayed from a CUDA graph, which models don't see.
        signals: which signals to take as requests; () for none. At most one object of a process can have signals.
        grace_s: seconds (or a timedelta) that a request may take; None: no limit.
        process_group: the ranks that stop. None: the default group, or the models' if that isn't part of it.

    Raises:
        TypeError: not a model of torchddp; ``grace_s`` is not a duration.
        ValueError: ``grace_s`` is negative or NaN; a signal that can't be caught; models of several jobs.
        RuntimeError: another object of this process has the signals; the process group has no store.
    """

    def __init__(
        self,
        *models: torch.nn.Module,
        signals: Iterable[int] = SIGNALS,
        grace_s: Duration | None = 300.0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._models = tuple(itertools.chain.from_iterable(map(_reduced, models)))
        self._grace_s = seconds(grace_s, "grace_s")
        self._lock = threading.Condition()
        self._checks = 0
        self._passed = _NOTHING_CHECKED  # the position of the last check that said no
        self._asked: str | None = None  # why, if this rank is asked to stop
        self._request: Request | None = None  # the job's
        self._since_s = 0.0  # when this rank knew of it, or was asked; 0: not yet
        self._claimed = self._published = False
        self._publishing = threading.Lock()
        self._last_step: int | None = None  # see Note [The last step]
        self._stops = False
        self._pid = os.getpid()
        self._before = sum(model.reducer.steps_of_group for model in self._models)
        self._positions: dict[int, int] = {}  # that ranks have published, as far as this one has asked
        self._warned = False
        self._signals = _checked_signals(signals)
        self._taken = 0  # the signal that was taken as a request
        self._group = _group_of(process_group, self._models)
        self._board = None if self._group is None else Board(self._group, "stop_together")
        self._every_s = min(_SLOWEST_LOOK_S, _LOOK_S * (1.0 if self._board is None else self._board.load))
        if self._signals:
            _C.catch_stop_signals(self._signals)
            _caught[:] = self._signals
        self._task: Task | None = watch(self._look, self._every_s)
        if self._board is not None:
            self._board.link.at_end(self.close)

    # --- on the program's threads ---

    def __bool__(self) -> bool:
        """Whether to stop now. RuntimeError in a forked child, whose ranks these are not."""
        if self._stops:
            return True
        if os.getpid() != self._pid:
            raise RuntimeError("StopTogether was created by the process that forked this one: create another here")
        with self._lock:
            here = self._position()
            if self._request is None:
                self._passed = here
                return False
            while self._last_step is None and self._task is not None:
                self._lock.wait(_LOOK_S)  # with pauses, in which the main thread handles signals
            self._stops = self._last_step is not None and here > self._last_step
            request = self._request
        if self._stops:
            logger.info("rank %d stops after step %d: %s", self._rank, _C.finished_steps(), request)
        return self._stops

    def request(self, reason: str = "request()") -> None:
        """Ask all ranks to stop; only the first request of the job counts. From any thread or signal handler."""
        if self._asked is None:
            self._asked = str(reason)

    @property
    def reason(self) -> str | None:
        """Why the ranks stop, such as 'SIGTERM on rank 1'; None as long as this rank knows of no request."""
        request = self._request
        return None if request is None else str(request)

    def close(self) -> None:
        """Stop looking for requests, and let signals do what they did before. The last answer of checks stays."""
        if self._task is None or os.getpid() != self._pid:
            return
        with self._lock:
            task, self._task = self._task, None
            self._lock.notify_all()
        task.close()
        if self._signals:
            _caught.clear()
            _C.release_stop_signals(heeded=self._stops or self._last_step == _NEVER)
        if self._board is not None and self._last_step is None:
            with suppress(RuntimeError):  # the store may be gone
                self._publish(self._board, leaves=True)

    def __enter__(self) -> StopTogether:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # --- the watcher ---

    def _look(self) -> None:
        if self._task is None or self._stops:
            return
        if self._signals and not self._taken and (number := _C.noted_stop_signal()):
            self._taken = number
            self.request(signal.Signals(number).name)
        if self._asked is not None and not self._since_s:
            self._since_s = time.monotonic()
        try:
            self._agree(self._task)
        except RuntimeError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "StopTogether on rank %d can't reach the store of the process group: %s", self._rank, error
                )
        if self._since_s and self._grace_s is not None and time.monotonic() - self._since_s > self._grace_s:
            self._give_up(self._task)

    def _agree(self, task: Task) -> None:
        if self._request is None and (found := self._find_request()) is not None:
            self._learn(found)
        if self._request is None:
            return
        task.every_s = _SOON_S
        if self._board is None:
            self._decide(self._passed)
            return
        if not self._published:
            self._publish(self._board)
        if self._last_step is None:
            self._decide(self._ask_for_last_step(self._board))
        if self._last_step is not None:
            task.every_s = self._every_s

    def _find_request(self) -> Request | None:
        own = None if self._asked is None else Request(self._rank, self._asked)
        if self._board is None:
            return own
        if own is not None and (self._claimed or self._board.claim("request")):
            self._claimed = True  # if posting fails, it is tried again
            self._board.post("request", own)
        found = self._board.read("request")
        return None if found is None else Request(*found)

    def _learn(self, request: Request) -> None:
        """From here on checks wait for the last step."""
        tell("stop_request", rank=request.rank, reason=request.reason)
        with self._lock:
            self._request, self._since_s = request, self._since_s or time.monotonic()

    def _publish(self, board: Board, leaves: bool = False) -> None:
        """For the others: the position of this rank's last check, and whether its watcher ends."""
        with self._publishing:
            if leaves or not self._published:
                board.post_own("passed", (self._passed, leaves))
                self._published = True

    def _ask_for_last_step(self, board: Board) -> int | None:
        """Rank 0 collects, so that a large world does not ask for everything everywhere; all do once it has left."""
        if board.rank > 0:
            if (found := board.read("last_step")) is not None:
                return int(found)
            if not ((board.read("passed/0") or (0, False))[1] or self._is_dead(0)):
                return None
        known = [found for rank in range(board.size) if (found := self._position_of(board, rank)) is not None]
        if len(known) < board.size:
            return None
        last = max(known)
        if board.rank == 0:
            board.post("last_step", last)
        return last

    def _position_of(self, board: Board, rank: int) -> int | None:
        if rank not in self._positions:
            if (found := board.read(f"passed/{rank}")) is not None:
                self._positions[rank] = found[0]
            elif self._is_dead(rank):  # the others stop without it, if no collective fails before
                self._positions[rank] = _NOTHING_CHECKED
        return self._positions.get(rank)

    def _is_dead(self, rank: int) -> bool:
        known = () if self._group is None else peers_of(self._group)
        return rank < len(known) and look_up(known[rank]) == GONE

    def _decide(self, last_step: int | None) -> None:
        with self._lock:
            self._last_step = last_step
            self._lock.notify_all()

    def _give_up(self, task: Task) -> None:
        """No step has ended in time: what asked this rank to stop does what it did before."""
        with self._lock:
            if self._stops or self._task is None:
                return
            task.close()
            self._last_step = _NEVER
            self._lock.notify_all()
        logger.error(
            "rank %d could not agree on a last step with the others within %g s of a request to stop (%s), and %s",
            self._rank,
            self._grace_s,
            self._request or self._asked,
            "ends as the signal would have ended it" if self._taken else "goes on",
        )
        if self._taken:
            _C.pass_on_stop_signal(self._taken)

    # --- details ---

    def _position(self) -> int:
        counts = not self._models
        steps = -self._before
        for model in self._models:
            reducer = model.reducer
            steps += reducer.steps_of_group
            counts = counts or reducer.is_in_graph
        self._checks += counts
        return steps + self._checks

    @property
    def _rank(self) -> int:
        return 0 if self._board is None else self._board.rank


def _in_child() -> None:
    """In a DataLoader's worker, torch installs its own handler of SIGTERM, with which any such signal ends it."""
    if _caught:
        _torch.after_workers_handlers(lambda: _C.catch_stop_signals(_caught, for_parent=True))


os.register_at_fork(after_in_child=_in_child)


def _reduced(model: torch.nn.Module) -> list[DistributedDataParallel]:
    """Those whose steps are counted; TypeError if there are none."""
    is_module = isinstance(model, torch.nn.Module)
    found: list[DistributedDataParallel] = [*engines_in(model)] if is_module else []
    if is_module and isinstance(wrapper := unwrapped(model), DistributedDataParallel):
        found = [wrapper]
    if not found:
        raise TypeError(
            "StopTogether needs models of torchddp (DistributedDataParallel, ShardedDataParallel, or a module after "
            f"replicate()), whose steps it counts; got {torch.typename(model)}. Without a model, it counts the checks."
        )
    return found


def _checked_signals(signals: Iterable[int]) -> tuple[int, ...]:
    found = tuple(signals) if isinstance(signals, Iterable) else (None,)
    if not all(isinstance(each, int) for each in found):
        raise TypeError(f"signals must be a list, such as [signal.SIGTERM], or () for none; got {signals!r}")
    return found


def _group_of(group: dist.ProcessGroup | None, models: tuple[DistributedDataParallel, ...]) -> dist.ProcessGroup | None:
    """None if the rank is alone."""
    if group is None and models:
        homes = {home_of(model.process_group) for model in models}
        if len(homes) > 1:
            raise ValueError("StopTogether got models of several jobs: say which ranks stop, with process_group=")
        group = homes.pop()
    group = dist.group.WORLD if group is None else group
    # An int for a rank that is outside of the group.
    return group if isinstance(group, dist.ProcessGroup) and group.size() > 1 else None
