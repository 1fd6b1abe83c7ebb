"""Loops over batches that end on all ranks together, when the first rank runs out."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from torchddp import _C, _torch
from torchddp.comm_hooks.exchange import new_group
from torchddp.errors import TransportError
from torchddp.sync.microbatches import unwrapped
from torchddp.transport.agreement import align_group_counts, group_timeout

T = TypeVar("T")
# What a rank reports about its next batch.
_MORE, _END, _ERROR = 0, 1, 2


def even_batches(
    batches: Iterable[T], model: torch.nn.Module | None = None, *, process_group: dist.ProcessGroup | None = None
) -> Iterator[T]:
    """Yield batches until the rank with the fewest runs out; then the loop ends on all ranks.

    Example:

        for batch in torchddp.sync.even_batches(loader, model):
            optimizer.zero_grad()
            loss_of(model(batch)).backward()
            optimizer.step()

    For loaders of different or unknown length, instead of a sampler that pads or ``join()``. Remaining batches of the
    other ranks are dropped. One batch is prefetched: before a rank yields a batch it sends the others whether it has
    another, in 4 bytes per rank over a separate gloo group, sent during that step.

    Args:
        batches: any iterable; a new iterator is created at the first batch.
        model: a DistributedDataParallel (torch's too, compiled or not), whose ranks end together.
        process_group: the ranks that end together, without a model. None: the default group, if any.

    Collective among those ranks: the first call for a group (which creates the separate group), and each batch. Loops
    may be nested. All ranks may leave the loop at the same batch (``break``); if one rank alone leaves, the others fail
    in the next batch after the process group's timeout.

    Raises:
        TypeError: ``model`` or ``process_group`` is something else, or both are given.
        RuntimeError: another rank's iterator raised (names the rank). That rank gets the original.
        TransportError: a peer died or left its loop.
    """
    group = _group_of(model, process_group)
    if group is None or group.size() == 1:
        return iter(batches)
    if group not in _agreements:
        _agreements[group] = _Agreement(group)
    return _even(_Source(batches), _agreements[group])


class _Source(Generic[T]):
    def __init__(self, batches: Iterable[T]) -> None:
        self._batches = batches
        self._iterator: Iterator[T] | None = None
        self._next: list[T] = []
        self.error: Exception | None = None

    def look(self) -> int:
        """Fetch the next batch, and return whether there is one."""
        try:
            if self._iterator is None:
                self._iterator = iter(self._batches)
            self._next.append(next(self._iterator))
        except StopIteration:
            return _END
        except Exception as error:
            self.error = error
            return _ERROR
        return _MORE

    def take(self) -> T:
        return self._next.pop()


class _Agreement:
    def __init__(self, process_group: dist.ProcessGroup) -> None:
        own = process_group
        if _torch.is_alive(process_group):
            ranks = dist.get_process_group_ranks(process_group)
            align_group_counts(process_group)
            own = new_group(ranks, torch.device("cpu"), group_timeout(process_group))
        self._transport = _C.C10dTransport(own)
        self.rank: int = process_group.rank()
        self._size: int = process_group.size()

    def start(self, said: int) -> tuple[_C.Work, torch.Tensor]:
        """Collective. Does not wait."""
        answers = torch.zeros(self._size, dtype=torch.int32)
        answers[self.rank] = said
        work = self._transport.make_work()
        self._transport.all_reduce(answers, work)
        return work, answers


def _even(source: _Source[T], agreement: _Agreement) -> Iterator[T]:
    number = 0
    work, answers = agreement.start(source.look())
    try:
        while _go_on(work, answers, source, agreement.rank, number):
            batch = source.take()
            # Before the batch is yielded: between the same steps on every rank, whatever these send.
            work, answers = agreement.start(source.look())
            yield batch
            del batch
            number += 1
    finally:
        work.abandon()  # if the loop was left early: the other ranks have started it too, so it completes


def _go_on(work: _C.Work, answers: torch.Tensor, source: _Source[T], rank: int, number: int) -> bool:
    try:
        work.wait()
    except TransportError as error:
        raise TransportError(
            f"{error}\neven_batches on rank {rank}: could not agree on batch {number}: a rank died or left its loop."
        ) from error
    if source.error is not None:
        raise source.error
    if failed := (answers == _ERROR).nonzero().flatten().tolist():
        ranks = f"rank {failed[0]}" if len(failed) == 1 else f"ranks {', '.join(map(str, failed))}"
        raise RuntimeError(
            f"even_batches: the loop on rank {rank} ends at batch {number}, because fetching that batch raised an "
            f"exception on {ranks}: see the error there"
        )
    return not answers.any()


# Shared by all loops over a group, because process groups are expensive.
_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, _Agreement] = weakref.WeakKeyDictionary()


def _group_of(model: object, process_group: object) -> dist.ProcessGroup | None:
    if model is None:
        if process_group is None:
            return dist.group.WORLD
        if isinstance(process_group, dist.ProcessGroup):
            return process_group
        raise TypeError(f"process_group must be a process group or None, got {type(process_group).__name__}")
    wrapper = unwrapped(model) if isinstance(model, torch.nn.Module) else None
    if not isinstance(wrapper, torch.nn.parallel.DistributedDataParallel) or process_group is not None:
        also = " with process_group=, which takes its place" if process_group is not None else ""
        raise TypeError(f"model must be a DistributedDataParallel or None, got {torch.typename(model)}{also}")
    return wrapper.process_group
