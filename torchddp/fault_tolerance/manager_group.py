"""The replicas of a torchft Manager as a process group that the reducer can use.

Note [A group of one]
~~~~~~~~~~~~~~~~~~~~~
Replicas come and go between steps, so the group has one rank, this replica: nothing that assumes a fixed set of ranks
(agreement on a plan, broadcasts of weights) happens over it. Only sums go to the manager, which sends them to whoever
takes part in the step; the reducer asks how many those are when a backward begins, and scales by that while it packs.
The manager's own average would be another pass over the bucket, after the last wait.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchddp.comm_hooks import CommHook
from torchddp.fault_tolerance.manager import count_participants

_SUM = dist.ReduceOp.SUM


class ManagerGroup(dist.ProcessGroup):
    """See Note [A group of one].

    Attributes:
        sums_used: whether maps of used parameters are summed over the replicas. Otherwise each replica goes by its own.
        refusal: what to tell who would average over this group, which would do nothing.
        failed: a sum since the last `take_failure` did not succeed.
    """

    refusal = (
        "this is the process group of a model under a torchft Manager: only its gradients can go through it. "
        "torchddp.fault_tolerance.PeriodicAverager(manager, ...) averages parameters."
    )

    def __init__(self, manager: Any) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # torch's stubs lack this one
        self.manager = manager
        self.sums_used = False
        self.failed = False

    def take_failure(self) -> bool:
        failed, self.failed = self.failed, False
        return failed

    def open_exchange(self, hook: CommHook) -> ManagerExchange:
        """For a communication hook. RuntimeError: it sends more than sums, and a manager has nothing else."""
        if not hook.sends_sums_only:
            raise RuntimeError(
                f"{type(hook).__name__} sends messages between fixed ranks, and a torchft Manager has all-reduces "
                "only: use torchddp.comm_hooks.PowerSGD, or no hook"
            )
        return ManagerExchange(self)

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Starts the sum of one tensor over the replicas. Never raises for an error of the network."""
        (tensor,) = tensors
        if not (tensor.is_floating_point() or tensor.is_complex() or self.sums_used):
            return _Done()
        return _ManagedSum(self, self.manager.allreduce(tensor, reduce_op=_SUM))

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        return _Done()

    def barrier(self, opts: Any = None) -> dist.Work:
        return _Done()

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return "torchft"


class ManagerExchange:
    """What a communication hook sends between the replicas: exact sums, and nothing else.

    The part of `torchddp.comm_hooks.exchange.Exchange` that such hooks need. Not collective to make. A sum that fails
    raises nothing: its values are of no use then, and the manager knows.
    """

    rank = 0
    is_shared = True  # with the sums of maps of used parameters, which the main thread would send
    is_alone = False  # a replica that heals must get the sum of the others, though only one takes part

    def __init__(self, group: ManagerGroup) -> None:
        self.process_group = group
        self.sent_bytes = 0

    @property
    def world_size(self) -> int:
        """How many replicas take part in this step."""
        return count_participants(self.process_group.manager)

    def step_after(self, number: int) -> int:
        """All replicas count the steps that were committed, however many of them each has made itself."""
        return self.process_group.manager.current_step() + 1

    def sum_(self, flat: Tensor) -> None:
        """In place: the sum over the replicas that take part, the same bits on each."""
        if flat.numel() == 0:
            return
        self.process_group.allreduce([flat]).wait()
        size = self.world_size
        self.sent_bytes += 2 * flat.nbytes * (size - 1) // size


class _Done(dist._Work):
    """Nothing was to be done."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class _ManagedSum(dist._Work):
    """A sum under way. It always ends well for the reducer: what the step is worth is should_commit()'s to say."""

    def __init__(self, group: ManagerGroup, work: dist.Work) -> None:
        super().__init__()
        self._group = group
        self._work = work
        # torchft asserts that who waits is on the stream that the sum was started on; backward may end on another.
        self._stream = torch.accelerator.current_stream() if torch.accelerator.is_available() else None

    def wait(self, timeout: Any = None) -> bool:
        # The futures of torchft are lazy: they get their values in here. The time limit is the manager's.
        with self._stream if self._stream is not None else contextlib.nullcontext():
            succeeded = self._work.wait()
        if self._stream is not None:
            torch.accelerator.current_stream().wait_stream(self._stream)
        if not succeeded or self._group.manager.errored() is not None:
            self._group.failed = True
        return True
