"""Broadcasts a module's buffers as one message, whatever their dtypes."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchddp.errors import TransportError

Layout = tuple[tuple[torch.dtype, torch.Size, torch.device], ...]


def supports(buffers: Sequence[torch.Tensor]) -> bool:
    """Whether these can travel as bytes of one tensor: ordinary dense tensors of one device."""
    first = buffers[0].device
    return all(b.layout == torch.strided and b.device == first and b.device.type != "meta" for b in buffers)


class BufferBroadcaster:
    """Holds, per rank, one copy of the buffers as bytes; made anew when their dtypes or shapes change.

    torch sends one message per dtype: a batch norm's float statistics and its integer counter take two. On a link
    where a small message costs what a large one does (gloo: hundreds of microseconds), one message halves that.
    """

    def __init__(self, process_group: Any, timeout: datetime.timedelta | None) -> None:
        self._group = process_group
        self._timeout = timeout
        self._layout: Layout = ()
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._views: list[torch.Tensor] = []

    def broadcast(self, buffers: Sequence[torch.Tensor], root: int) -> None:
        """Collective. On return ``buffers`` hold those of group rank ``root``.

        They must have the same dtypes and shapes on every rank.
        """
        layout = tuple((b.dtype, b.shape, b.device) for b in buffers)
        if layout != self._layout:
            self._allocate(layout)
        is_root = self._group.rank() == root
        targets = list(buffers)
        if is_root:
            torch._foreach_copy_(self._views, targets)
        options = dist.BroadcastOptions()
        options.rootRank = root
        try:
            work = self._group.broadcast([self._flat], options)
            ok = work.wait() if self._timeout is None else work.wait(self._timeout)
        except RuntimeError as error:
            raise TransportError(self._failure(root, str(error))) from error
        if not ok:
            raise TransportError(self._failure(root, "the process group reported that the operation failed"))
        if not is_root:
            torch._foreach_copy_(targets, self._views)

    def _failure(self, root: int, reason: str) -> str:
        return (
            f"rank {self._group.rank()}: the broadcast of {len(self._layout)} buffers ({self._flat.numel()} bytes) "
            f"from rank {root} failed before forward: {reason}\n"
            "A peer has died, left, or did not reach this step in time. "
            "Look at the other ranks' logs for the first error."
        )

    def _allocate(self, layout: Layout) -> None:
        sizes = [dtype.itemsize * shape.numel() for dtype, shape, _ in layout]
        self._flat = torch.empty(sum(sizes), dtype=torch.uint8, device=layout[0][2])
        views: list[torch.Tensor | None] = [None] * len(layout)
        offset = 0
        # Widest items first, so that each view is aligned to its item size without padding.
        for i in sorted(range(len(layout)), key=lambda i: -layout[i][0].itemsize):
            dtype, shape, _ = layout[i]
            views[i] = self._flat[offset : offset + sizes[i]].view(dtype).view(shape)
            offset += sizes[i]
        self._views = [view for view in views if view is not None]
        self._layout = layout
