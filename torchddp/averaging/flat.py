"""Means of many tensors over the ranks of a process group, in a few flat messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

import torch
import torch.distributed as dist

from torchddp import _C, _torch
from torchddp.averaging.parameters import Named, memory_of, sum_dtype
from torchddp.comm_hooks.exchange import Exchange, sum_over_ranks
from torchddp.ddp.model import param_specs
from torchddp.errors import TransportError, listed
from torchddp.traffic import Traffic

DEFAULT_CAP_MB = 25.0
Wire = Literal["fp32", "bf16", "fp16", "int8", "int4"]
WIRES = get_args(Wire)
_OWN_WIRE = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class FlatBucket:
    """Tensors of one dtype and device that are sent in one message, summed in at least fp32."""

    named: Named
    offsets: tuple[int, ...]
    numel: int

    @classmethod
    def of(cls, named: Named) -> FlatBucket:
        *offsets, end = accumulate((memory_of(t).numel() for t in named.values()), initial=0)
        return cls(named, tuple(offsets), end)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.named.values())).dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        return sum_dtype(self.dtype)

    def new_flat(self) -> torch.Tensor:
        return torch.empty(self.numel, dtype=self.sum_dtype, device=next(iter(self.named.values())).device)

    def pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        memories = map(memory_of, self.named.values())
        return [flat[offset : offset + m.numel()] for offset, m in zip(self.offsets, memories, strict=True)]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The same, with the shapes and strides of the tensors, which must be real."""
        tensors = self.named.values()
        return [
            flat.as_strided(t.shape, t.stride(), flat.storage_offset() + offset)
            for t, offset in zip(tensors, self.offsets, strict=True)
        ]

    def pack(self, flat: torch.Tensor) -> None:
        _torch.foreach_copy_(self.pieces(flat), [memory_of(t) for t in self.named.values()])

    def unpack(self, flat: torch.Tensor) -> None:
        _torch.foreach_copy_([memory_of(t) for t in self.named.values()], self.pieces(flat))


def check_cap(cap_mb: float) -> None:
    if not cap_mb > 0:
        raise ValueError(f"bucket_cap_mb must be above 0, got {cap_mb}")


def plan_buckets(named: Named, cap_mb: float) -> list[FlatBucket]:
    """Buckets of at most ``cap_mb`` MiB of tensors, in their order; a larger tensor gets its own."""
    check_cap(cap_mb)
    names, tensors = list(named), list(named.values())
    specs = param_specs(tensors, names, [False] * len(names))
    plan = _C.make_bucket_plan(specs, range(len(names)), [max(1, int(cap_mb * 2**20))])
    return [FlatBucket.of({names[i]: tensors[i] for i in bucket.params}) for bucket in plan.buckets]


def check_wire(wire: Wire | None, named: Named) -> None:
    """ValueError for an unknown format, TypeError for parameters that it can't carry."""
    if wire is None:
        return
    if wire not in WIRES:
        raise ValueError(f"wire must be None or one of {', '.join(map(repr, WIRES))}, got {wire!r}")
    for name, tensor in named.items():
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"wire={wire!r} can't carry parameter '{name}' in {tensor.dtype}: use wire=None")


def wire_of(wire: Wire | None, bucket: FlatBucket) -> str:
    """The message's format. None: 16-bit tensors in their own format, all others unchanged."""
    return wire or _OWN_WIRE.get(bucket.dtype, "fp32")


def average_flat(exchange: Exchange, flat: torch.Tensor, wire: str) -> None:
    """Collective, in place: the mean over the exchange's ranks, the same bits on each; RuntimeError if a peer is lost.

    ``flat``: [n], contiguous, fp32 unless ``wire`` is "fp32", which sends it unchanged.
    """
    if wire == "fp32":
        flat.div_(exchange.world_size)  # before the sum, as torch's averagers do: it can't overflow
        exchange.sum_(flat)
    else:
        sum_over_ranks(exchange, flat, wire, 1.0 / exchange.world_size)


class FlatMeans:
    """Means of many tensors, bucket by bucket. Construction is collective. ``who``: the averaging class, for errors."""

    def __init__(self, named: Named, process_group: dist.ProcessGroup, who: str, cap_mb: float) -> None:
        self.buckets = plan_buckets(named, cap_mb)
        self.traffic = Traffic(0, 0)
        self._who, self._group = who, process_group
        device = next(iter(named.values())).device
        self._exchange = Exchange(process_group, device)
        largest: dict[torch.dtype, int] = {}
        for bucket in self.buckets:
            largest[bucket.sum_dtype] = max(largest.get(bucket.sum_dtype, 0), bucket.numel)
        self._scratch = {dtype: torch.empty(n, dtype=dtype, device=device) for dtype, n in largest.items()}

    @torch.no_grad()
    def average(self, step: int) -> None:
        """Collective, in place, with the same bits on all ranks. TransportError: a peer died or did not arrive."""
        before, payload_bytes = self._exchange.sent_bytes, 0
        for index, bucket in enumerate(self.buckets):
            flat = self._scratch[bucket.sum_dtype][: bucket.numel]
            bucket.pack(flat)
            payload_bytes += flat.nbytes
            try:
                average_flat(self._exchange, flat, wire_of(None, bucket))
            except TransportError as error:
                what = f"bucket {index} of {len(self.buckets)}"
                raise lost_peer(self._group, self._who, step, what, list(bucket.named), error) from error
            bucket.unpack(flat)
        self.traffic = Traffic(payload_bytes, self._exchange.sent_bytes - before)


def lost_peer(
    process_group: dist.ProcessGroup, who: str, step: int, what: str, names: Sequence[str], error: BaseException
) -> TransportError:
    shown = listed([f"'{name}'" for name in names], 3)
    return TransportError(
        f"{error}\nrank {process_group.rank()}: {who} could not average {what} ({shown}) at step {step}. All ranks "
        "must take the same number of steps. Parameters may be partly averaged: go back to a checkpoint."
    )
