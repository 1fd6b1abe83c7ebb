"""Parameters as views of flat memory, one owner's side by side, so that they travel without being copied together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from torchddp import _C

# Views begin at multiples of this many bytes: what vectorised kernels like, and every dtype's alignment.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class ChunkPlan:
    """Parameters of one owner, device and dtype that lie together: their indices, and where each begins (elements)."""

    owner: int
    params: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int


def plan_chunks(
    numels: Sequence[int],
    kinds: Sequence[object],
    itemsizes: Sequence[int],
    owners: Sequence[int],
    max_bytes: int,
    small_numel: int,
) -> list[ChunkPlan]:
    """Chunks of at most ``max_bytes`` each, a larger parameter alone, in the order of their first parameter. Pure.

    Parameters share a chunk only if their ``kinds`` (device and dtype) and owners are equal. Those without elements are
    in none. In a chunk those of less than ``small_numel`` elements come first, so that they are neighbours.
    """
    if not len(numels) == len(kinds) == len(itemsizes) == len(owners):
        raise ValueError("lists of one length are needed")
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
    chunks: list[list[int]] = []
    filled: list[int] = []
    open_ones: dict[tuple[object, int], int] = {}
    for index, numel in enumerate(numels):
        if numel == 0:
            continue
        key = (kinds[index], owners[index])
        size = _aligned(numel, itemsizes[index]) * itemsizes[index]
        at = open_ones.get(key)
        if at is None or filled[at] + size > max_bytes:
            at = open_ones[key] = len(chunks)
            chunks.append([])
            filled.append(0)
        chunks[at].append(index)
        filled[at] += size
    return [_lay_out(owners[chunk[0]], chunk, numels, itemsizes[chunk[0]], small_numel) for chunk in chunks]


def _lay_out(owner: int, indices: Sequence[int], numels: Sequence[int], itemsize: int, small_numel: int) -> ChunkPlan:
    params = sorted(indices, key=lambda index: (numels[index] >= small_numel, index))
    offsets = [0, *accumulate(_aligned(numels[index], itemsize) for index in params[:-1])]
    return ChunkPlan(owner, tuple(params), tuple(offsets), offsets[-1] + numels[params[-1]])


def _aligned(numel: int, itemsize: int) -> int:
    """Elements from the beginning of a parameter to that of the next."""
    step = max(1, ALIGNMENT_BYTES // itemsize)
    return -(-numel // step) * step


class Chunk:
    """The flat memory of a `ChunkPlan`. Parameters keep their identity; their memory moves."""

    def __init__(self, plan: ChunkPlan, params: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        self.owner = plan.owner
        self.params = [params[index] for index in plan.params]
        self.flat = flat
        self._views = [
            _C.make_flat_view(flat, offset, _dense(param))
            for param, offset in zip(self.params, plan.offsets, strict=True)
        ]
        self._addresses = [view.data_ptr() for view in self._views]

    @torch.no_grad()
    def take_in(self) -> None:
        """Moves parameters whose memory is elsewhere: at first, or since user code gave them other memory."""
        for param, view, address in zip(self.params, self._views, self._addresses, strict=True):
            if param.data_ptr() == address:
                continue
            if param.shape != view.shape or param.dtype != view.dtype or param.device != view.device:
                raise RuntimeError(
                    f"a parameter was {view.dtype}{list(view.shape)} on {view.device} when the module was wrapped, and "
                    f"is now {param.dtype}{list(param.shape)} on {param.device}: change it by the to() of the "
                    "ShardedDataParallel, or wrap again"
                )
            view.copy_(param.detach())
            param.data = view

    @torch.no_grad()
    def let_go(self, params: Collection[torch.Tensor]) -> None:
        """Those that lie here and are among these get memory of their own, so that nothing keeps the chunk's."""
        for param, address in zip(self.params, self._addresses, strict=True):
            if param in params and param.data_ptr() == address:
                param.data = param.detach().clone()


def _dense(param: torch.Tensor) -> torch.Tensor:
    data = param.detach()
    dense = data.is_contiguous() or data.is_contiguous(memory_format=torch.channels_last)
    return data if dense else torch.empty_like(data, memory_format=torch.contiguous_format)
