"""A process group of the simulated GPU, for communication hooks."""

import datetime
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.simgpu.device import NAME
from torchddp.comm_hooks import exchange, formats
from torchddp.transport import nccl

# On the CPU, too: the compiled functions round sums of three ranks another way.
formats.compress, formats.decompress = formats.compress_reference, formats.decompress_reference

# Long, because an unused communicator's watchdog never learns that its operations have finished.
LIMIT = datetime.timedelta(hours=1)
DEVICE = torch.device(NAME, 0)


class Group:
    """What hooks use of ProcessGroupNCCL, over a communicator of its own. Collective.

    It adds in the order of the ranks, as shared memory does.
    """

    def __init__(self) -> None:
        self._ranks = dist.new_group(timeout=LIMIT)
        self.transport: Any = nccl.connect(self._ranks, DEVICE, LIMIT)

    def size(self) -> int:
        return self._ranks.size()

    def rank(self) -> int:
        return self._ranks.rank()

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> "Work":
        assert options.reduceOp == dist.ReduceOp.SUM
        work = self.transport.make_work()
        for tensor in tensors:
            self.transport.all_reduce(tensor, work)
        return Work(work, tensors)

    def _allgather_base(self, output: Tensor, value: Tensor) -> "Work":
        work = self.transport.make_work()
        self.transport.all_gather(output, value, work)
        return Work(work, [output])

    def alltoall_base(self, output: Tensor, value: Tensor, _output_sizes: list[int], _sizes: list[int]) -> "Work":
        everything = value.new_empty(self.size() * value.numel())
        self._allgather_base(everything, value).wait()
        output.copy_(everything.view(self.size(), self.size(), -1)[:, self.rank()].reshape(-1))
        return Work(self.transport.make_work(), [output])

    def close(self) -> None:
        del self.transport
        dist.destroy_process_group(self._ranks)


class Work:
    """Its result may be used on the streams that wait for it, or for its future."""

    def __init__(self, work: Any, tensors: list[Tensor]) -> None:
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[DEVICE])
        stream = torch.Stream(device=NAME)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            work.wait(LIMIT)
            self._future.set_result(tensors)

    def wait(self) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        return self._future


class Alone:
    """A group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def groups_of_exchange(_process_group: dist.ProcessGroup, purpose: Any) -> Any:
    """What torchddp's own hooks send through: every rank counts as a host; with hierarchical=True there is one host."""
    group: Any = Group()
    outer, inner = (Alone(), Group().transport) if purpose[1] is True else (group, None)
    return exchange._Groups(group.transport, outer, inner, purpose)


def hooks_use_groups() -> Any:
    """Until its end, hooks that are registered send through groups of the simulated GPU."""
    return mock.patch.object(exchange, "_make_groups", groups_of_exchange)
