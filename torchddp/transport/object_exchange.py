"""What one rank knows, told to all."""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device

from torchddp.transport.waits import wait_for_work

__all__ = ["gather_objects", "object_of", "tensor_of"]


def gather_objects(value: Any, process_group: Any = None) -> list[Any]:
    """Every rank's value, in rank order; collective. Values travel pickled.

    torch's ``all_gather_object`` does the same, where numpy is installed.
    """
    device = torch.device(_get_object_coll_device(process_group))
    own = tensor_of(value).to(device)
    size = dist.get_world_size(process_group)
    lengths = list(torch.empty(size, dtype=torch.int64, device=device).split(1))
    _all_gather(lengths, torch.tensor([own.numel()], device=device), process_group)
    numels = [int(length) for length in lengths]
    padded = torch.zeros(max(numels), dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    received = [torch.empty_like(padded) for _ in range(size)]
    _all_gather(received, padded, process_group)
    return [object_of(data[:numel]) for data, numel in zip(received, numels, strict=True)]


def _all_gather(received: list[torch.Tensor], own: torch.Tensor, process_group: Any) -> None:
    work = dist.all_gather(received, own, group=process_group, async_op=True)
    wait_for_work(work, process_group)


def tensor_of(value: Any) -> torch.Tensor:
    """The value, pickled, as bytes on the CPU."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def object_of(data: torch.Tensor) -> Any:
    """What `tensor_of` was given. Without numpy, which neither torch nor this package needs to be there."""
    data = data.cpu().contiguous()
    return pickle.loads(ctypes.string_at(data.data_ptr(), data.numel()))
