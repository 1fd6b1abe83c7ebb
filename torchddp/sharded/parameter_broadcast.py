"""How updated parameters get from their owner to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from torchddp.transport.waits import wait_for_work


@dataclass
class Bucket:
    """Parameters of one owner, device and dtype that travel in one message."""

    owner: int
    device: torch.device
    dtype: torch.dtype
    params: list[torch.Tensor] = field(default_factory=list)
    numel: int = 0


def plan_buckets(params: Sequence[torch.Tensor], owners: Sequence[int | None], max_numel: int) -> list[Bucket]:
    """Buckets of at most ``max_numel`` elements (-1: no limit); a larger parameter has one of its own.

    In the order of their first parameter, so that all ranks start the same messages in the same order.
    """
    buckets: list[Bucket] = []
    open_ones: dict[tuple[int, torch.device, torch.dtype], Bucket] = {}
    for param, owner in zip(params, owners, strict=True):
        if owner is None or param.numel() == 0:
            continue
        key = (owner, param.device, param.dtype)
        bucket = open_ones.get(key)
        if bucket is None or 0 < max_numel < bucket.numel + param.numel():
            bucket = open_ones[key] = Bucket(*key)
            buckets.append(bucket)
        bucket.params.append(param)
        bucket.numel += param.numel()
    return buckets


class ParameterBroadcast:
    """The messages after each step. Flat memory is held only while they are on the way."""

    def __init__(self, buckets: Sequence[Bucket], group: dist.ProcessGroup, half: bool) -> None:
        self.buckets = list(buckets)
        self._group = group
        self._rank = group.rank()
        self._half = half

    @torch.no_grad()
    def run(self) -> None:
        """Collective. All messages are started before any is waited for."""
        if self._group.size() == 1:
            return
        sent = [self._start(bucket) for bucket in self.buckets]
        for bucket, (flat, work) in zip(self.buckets, sent, strict=True):
            wait_for_work(work, self._group)
            self._finish(bucket, flat)

    def _start(self, bucket: Bucket) -> tuple[torch.Tensor, Any]:
        if self._in_place(bucket):
            flat = bucket.params[0].detach().view(-1)
        elif self._rank != bucket.owner:
            flat = torch.empty(bucket.numel, dtype=self._wire_dtype(bucket), device=bucket.device)
        else:
            flat = torch.cat([param.detach().reshape(-1) for param in bucket.params]).to(self._wire_dtype(bucket))
        # As bytes: no backend has all dtypes, and a broadcast does no arithmetic.
        work = dist.broadcast(flat.view(torch.uint8), group=self._group, group_src=bucket.owner, async_op=True)
        return flat, work

    def _finish(self, bucket: Bucket, flat: torch.Tensor) -> None:
        rounded = flat.dtype != bucket.dtype  # then the owner, too, goes on with what the others got
        if self._in_place(bucket) or (self._rank == bucket.owner and not rounded):
            return
        pieces = flat.split([param.numel() for param in bucket.params])
        for param, piece in zip(bucket.params, pieces, strict=True):
            param.copy_(piece.view(param.shape))

    def _wire_dtype(self, bucket: Bucket) -> torch.dtype:
        return torch.float16 if self._half and bucket.dtype == torch.float32 else bucket.dtype

    def _in_place(self, bucket: Bucket) -> bool:
        alone = len(bucket.params) == 1 and bucket.params[0].is_contiguous()
        return alone and self._wire_dtype(bucket) == bucket.dtype
