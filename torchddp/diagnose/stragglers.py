"""Names the rank that makes the others wait, while training runs: docs/stragglers.md."""

from __future__ import annotations

import logging
import os
import time
import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

from torchddp import _torch
from torchddp.ddp.observers import StepObserver
from torchddp.ddp.session import ReducerSession
from torchddp.diagnose.straggler_bets import CORE, PARTS, Finding, Rows, Sample, Sampler, StragglerTest
from torchddp.notices import tell
from torchddp.transport.agreement import host_of
from torchddp.transport.store import Board, try_board
from torchddp.transport.worker import Task, watch

logger = logging.getLogger("torchddp.straggler")

_LOOK_S = 0.25
_POSTED = 16  # samples, twice as many as fit between two looks
_BUCKETS_EVERY = 8  # samples


class Stragglers(StepObserver):
    """Measures this rank's steps from the times that the reducer takes anyway. `_Exchange` compares them.

    Not collective, but all ranks must create the same number in the same order. There is none for a copy of a model, a
    group of one rank, a group without a store, and a device whose steps the processor does not see.
    """

    def __init__(self, session: ReducerSession) -> None:
        self._session = session
        self._exchange: _Exchange | None = None
        self._begin = self._finished = session.reducer.finished_steps  # ranks may have finished different numbers
        self._since_ns = 0
        self._forward_ns = self._waited_ns = session.waited_ns
        self._waited_before_ns = session.waited_before_ns
        self._core = _Core()
        self._core_ns = self._samples = 0
        self._sampler = Sampler()
        if session.is_copy or session.device.type != "cpu":
            return
        board = try_board(session.process_group, "stragglers", partial(_cannot_compare, session.rank))
        if board is None:
            return
        try:
            self._exchange = _Exchange(board)
        except RuntimeError as error:  # no file descriptor is left
            return _cannot_compare(session.rank, error)
        self._end = weakref.finalize(self, self._exchange.close)

    # The compiler must not trace into it when a compiled program calls the model.
    @_torch.disable_dynamo(recursive=True)
    def before_step(self) -> None:
        if self._exchange is None:
            return
        session = self._session
        finished = session.reducer.finished_steps
        if finished != self._finished:
            self._note_step(self._exchange, finished)
        self._forward_ns = session.waited_ns

    def close(self) -> None:
        if self._exchange is not None:
            self._end()
        self._exchange = None

    def _note_step(self, exchange: _Exchange, finished: int) -> None:
        """A step has ended, with what came after it up to this forward."""
        session, now_ns = self._session, time.time_ns()
        stats = session.reducer.stats()
        begin_ns, ended_ns = stats["forward_compute_time_start"], stats["backward_comm_time_end"]
        # Waits in other places than the reduction: in the microbatches, in the forward, and after the step.
        in_microbatches_ns = self._forward_ns - self._waited_ns
        in_forward_ns = session.waited_ns - self._forward_ns
        after_ns = session.waited_before_ns - self._waited_before_ns
        since_ns, is_next = self._since_ns, finished == self._finished + 1
        times = (
            now_ns - ended_ns - after_ns,
            max(0, begin_ns - since_ns - in_microbatches_ns),
            stats["forward_compute_time"] - in_forward_ns,
            stats["backward_compute_time"],
            stats["exposed_comm_time"] + in_microbatches_ns + in_forward_ns + after_ns,
            ended_ns,
        )
        self._finished, self._since_ns = finished, now_ns
        self._waited_ns, self._waited_before_ns = session.waited_ns, session.waited_before_ns
        if not is_next or not since_ns or begin_ns > ended_ns or min(times) < 0:
            self._sampler.drop()  # not measured, or the clock was set
        elif self._sampler.add(finished - 1 - self._begin, now_ns - since_ns, times):
            core_ns = self._core.read_ns()
            exchange.samples.append(self._sampler.take(core_ns - self._core_ns))
            self._core_ns = core_ns
            self._samples += 1
            if self._samples % _BUCKETS_EVERY == 0:
                exchange.buckets = session.reducer.take_bucket_times()


class _Core:
    """How long a thread has been runnable without a core; 0 where the system doesn't say."""

    def __init__(self) -> None:
        self._file: int | None = None

    def read_ns(self) -> int:
        """Of the thread that calls this first."""
        if self._file is None:
            try:
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return 0
            weakref.finalize(self, os.close, self._file)
        try:
            return int(os.pread(self._file, 64, 0).split()[1])
        except (OSError, IndexError, ValueError):  # the thread has ended
            return 0


class _Exchange:
    """A task on the watcher: posts this rank's samples for all, and on rank 0 compares them and logs. Has no model."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.samples: deque[Sample] = deque(maxlen=_POSTED)  # from the training thread, as `buckets`
        self.buckets: BucketSums = 0, []
        self._posted = -1
        self._host = zlib.crc32(host_of(board.rank).encode())
        self._rows = Rows(board.size)
        self._test: StragglerTest | None = None
        self._named: Finding | None = None
        self._task: Task = watch(self._look, _LOOK_S * board.load)

    def close(self) -> None:
        self._task.close()

    def _look(self) -> None:
        if self._board.link.is_over:
            self.close()
            return
        samples = list(self.samples)
        if not samples or samples[-1].begin == self._posted:
            return
        try:
            self._board.post_own("samples", [self._host, samples, self.buckets])
            self._posted = samples[-1].begin
            if self._board.rank == 0:
                self._compare()
        except RuntimeError as error:  # the store doesn't answer, or the group was destroyed meanwhile
            _cannot_compare(self._board.rank, error)

    def _compare(self) -> None:
        posts = self._board.read_of_ranks("samples")
        if None in posts:
            return
        if self._test is None:
            self._test = StragglerTest([str(host) for host, *_ in posts])
        for rank, (_, samples, _) in enumerate(posts):
            self._rows.add(rank, [Sample(*values) for values in samples])
        for row in self._rows.take():
            self._test.add(row)
            self._report(self._test.named, row[0].end - 1, [buckets for *_, buckets in posts])

    def _report(self, found: Finding | None, step: int, buckets: Sequence[BucketSums]) -> None:
        before, self._named = self._named, found
        if found is None and before is not None:
            logger.warning("rank %d no longer makes the others wait (step %d)", before.rank, step + 1)
            tell("straggler_over", rank=before.rank)
        elif found is not None and (before is None or (found.rank, found.part) != (before.rank, before.part)):
            late = compare_buckets(found.rank, buckets)
            logger.warning("%s%s", describe(found), describe_buckets(late))
            lists = {name: [getattr(bucket, name) for bucket in late] for name in LateBucket._fields}
            tell("straggler", rank=found.rank, ratio=found.ratio, part=found.part, **lists)


def _cannot_compare(rank: int, error: RuntimeError) -> None:
    logger.debug("rank %d can't compare its times with the other ranks': %s", rank, error)


_WORDS = {
    "data": "between its steps (data, optimizer)",
    "microbatches": "in its microbatches before the synchronized one",
    "forward": "in forward",
    "backward": "in backward",
    "sending": "in sending: it waits for reductions that are over on other ranks of its host",
}


def describe(found: Finding) -> str:
    """One line. Steps are numbered from 1."""
    shared = f"its core is shared: it waited {_ms(found.core)} a step for a core"
    where = shared if found.part == CORE else f"most of it {_WORDS[found.part]}"
    parts = [
        f"{name} {_ms(own)} ({_ms(others)})"
        for name, own, others in zip(PARTS, found.own, found.others, strict=True)
        if name != "microbatches" or own or others
    ]
    also = f"; as slow: {', '.join(f'rank {rank}' for rank in found.also)}" if found.also else ""
    return (
        f"rank {found.rank} makes the others wait: without waits, its steps {found.first + 1} to {found.last + 1} take "
        f"{found.ratio:.2f} times as long as the others', {_ms(found.excess)} more a step, {where}. Its times a step, "
        f"and the others' median: {', '.join(parts)}{also}"
    )


# A number of steps; by bucket, from the end of the step before until it was packed, and the wait for it, in ns.
BucketSums = tuple[int, Sequence[tuple[int, int]]]


class LateBucket(NamedTuple):
    """One bucket of a rank beside the median of the other ranks', in seconds a step."""

    ready_later_s: float
    others_wait_s: float


def compare_buckets(rank: int, ranks: Sequence[BucketSums]) -> list[LateBucket]:
    """Of one rank, in plan order; empty if there are other buckets on other ranks, or no times of them yet."""
    if len({len(buckets) for _, buckets in ranks}) > 1 or not all(steps for steps, _ in ranks):
        return []
    found = []
    for of_ranks in zip(*(buckets for _, buckets in ranks), strict=True):
        means = [(ready / steps, wait / steps) for (ready, wait), (steps, _) in zip(of_ranks, ranks, strict=True)]
        own, _ = means.pop(rank)
        ready, wait = map(median, zip(*means, strict=True))
        found.append(LateBucket((own - ready) * 1e-9, wait * 1e-9))
    return found


def describe_buckets(late: Sequence[LateBucket]) -> str:
    """The end of `describe`'s line: how late the first and last bucket are, and which the others wait for longest."""
    if not late:
        return ""
    longest = max(range(len(late)), key=lambda bucket: late[bucket].others_wait_s)
    ready = [f"bucket {bucket} by {_ms(late[bucket].ready_later_s * 1e9)}" for bucket in sorted({0, len(late) - 1})]
    wait = _ms(late[longest].others_wait_s * 1e9)
    return f". Ready later than the others': {', '.join(ready)}. The others wait longest for bucket {longest}: {wait}"


def _ms(time_ns: float) -> str:
    return f"{time_ns * 1e-6:.1f} ms" if time_ns >= 1e6 or time_ns == 0 else f"{time_ns * 1e-6:.3f} ms"
