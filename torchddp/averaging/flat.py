"""The parameters that a method averages, and means of many tensors over a group's ranks, in a few flat messages."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from torchddp import _C, _torch
from torchddp.comm_hooks.exchange import Exchange, sum_over_ranks
from torchddp.ddp.model import check_is_group, param_specs
from torchddp.errors import TransportError, check_number, listed
from torchddp.traffic import Traffic
from torchddp.transport.agreement import Agreement, in_words

Named = dict[str, torch.Tensor]
_MESSAGE_BYTES = 25 * 1024 * 1024
# A module, its parameters with or without names, or an optimizer's groups.
ParamSource = nn.Module | Iterable[Any]


def named_parameters(source: ParamSource, also: Collection[int] = ()) -> Named:
    """The trainable parameters, each once, in order; unnamed ones are "params[3]". TypeError for anything else.

    ``also``: the ids of parameters that count even if they are frozen.
    """
    if isinstance(source, torch.Tensor) or not isinstance(source, nn.Module | Iterable):
        kinds = "a module, or an iterable of parameters, named parameters or groups"
        got = "a tensor" if isinstance(source, torch.Tensor) else type(source).__name__
        raise TypeError(f"params must be {kinds}, got {got}")
    if isinstance(source, nn.parallel.DistributedDataParallel):
        source = source.module  # with the bare module's names, so that checkpoints are interchangeable
    pairs = source.named_parameters() if isinstance(source, nn.Module) else _pairs(source)
    found: Named = {}
    seen: set[int] = set()
    for name, param in pairs:
        if not isinstance(param, torch.Tensor):
            raise TypeError(f"{name} must be a parameter, got {type(param).__name__}")
        if (param.requires_grad or id(param) in also) and param.numel() > 0 and id(param) not in seen:
            seen.add(id(param))
            found[name] = param
    return found


def _pairs(items: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    index = 0
    for item in items:
        if isinstance(item, Mapping):
            params = list(item["params"])
            names = item.get("param_names", [f"params[{index + i}]" for i in range(len(params))])
            yield from zip(names, params, strict=True)
            index += len(params)
        else:
            yield item if isinstance(item, tuple) else (f"params[{index}]", item)
            index += 1


def named_buffers(source: ParamSource, wanted: bool) -> Named:
    """The floating-point buffers of a module, such as running statistics; none unless ``wanted``."""
    if not wanted:
        return {}
    if not isinstance(source, nn.Module):
        raise TypeError(f"buffers=True needs a module as params, got {type(source).__name__}")
    return {name: b for name, b in source.named_buffers() if b.is_floating_point() and b.numel() > 0}


def buffers_now(module: nn.Module, buffers: Named) -> Named:
    """The tensors that the module has under these names now. ValueError if one is gone or has changed its layout."""
    found = dict(module.named_buffers(remove_duplicate=False))
    for name, before in buffers.items():
        if (now := found.get(name)) is None or _layout(now) != _layout(before):
            became = "is gone" if now is None else f"became {_layout(now)}"
            raise ValueError(f"buffer '{name}' {became}: it can't be averaged as {_layout(before)} any more")
    return {name: found[name] for name in buffers}


def _layout(tensor: torch.Tensor) -> str:
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return f"{tensor.dtype}{list(tensor.shape)} with strides {strides} on {tensor.device}"


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the order of memory, as a 1-d view of real numbers; the tensor must be dense."""
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return real.as_strided((real.numel(),), (1,), real.storage_offset())


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of ``dtype`` are summed: at least fp32, real."""
    return torch.float64 if dtype.to_real() == torch.float64 else torch.float32


def problem_of(named: Named) -> ValueError | None:
    """Why this rank can't average these; None if it can."""
    if not named:
        return ValueError("there is no parameter to average: none was given, or none has requires_grad")
    device = next(iter(named.values())).device
    for name, tensor in named.items():
        if tensor.device != device:
            first = next(iter(named))
            return ValueError(f"parameter '{name}' is on {tensor.device}, '{first}' on {device}: use one device")
        if tensor.is_sparse or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            return ValueError(
                f"parameter '{name}' (shape {list(tensor.shape)}, strides {list(tensor.stride())}) leaves gaps in its "
                "memory or overlaps itself, and can't be averaged in place: make it contiguous()"
            )
    return None


def verify_same(named: Named, agreement: Agreement, options: Mapping[str, object], new: Collection[int] = ()) -> None:
    """Collective. On every rank RuntimeError unless all have the same parameters, ValueError for different options.

    ``new``: the ids of those that this rank has not averaged before, which must be the same ones on all ranks.
    """
    if problem := problem_of(named):
        raise problem
    lines = [
        f"'{n}' {p.dtype}{list(p.shape)} with strides {list(p.stride())}{', new' if id(p) in new else ''}"
        for n, p in named.items()
    ]
    agreement.verify(lines, {name: in_words(value) for name, value in options.items()})


def broadcast_from_first(tensors: Iterable[torch.Tensor], process_group: dist.ProcessGroup) -> None:
    """Collective. Copy the values of the group's rank 0 to all ranks. The tensors must be on one device."""
    if process_group.size() > 1:
        broadcast = _C.TensorBroadcast(_C.C10dTransport(process_group), _MESSAGE_BYTES, datetime.timedelta(0))
        broadcast.run([tensor.detach() for tensor in tensors], 0)


def group_or_default(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``process_group``, or the default one. RuntimeError if there is none, or it can't average."""
    group = dist.group.WORLD if process_group is None else process_group
    if group is None:
        raise RuntimeError("there is no process group: call torch.distributed.init_process_group first")
    if (refusal := getattr(group, "refusal", None)) is not None:  # set on groups that can't average
        raise RuntimeError(refusal)
    check_is_group(group)
    return group


DEFAULT_CAP_MB = 25.0
Wire = Literal["fp32", "bf16", "fp16", "int8", "int4"]
WIRES = get_args(Wire)
_OWN_WIRE = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class FlatBucket:
    """Tensors of one dtype and device that are sent in one message, summed in at least fp32."""

    named: Named
    sizes: list[int]
    layouts: list[tuple[torch.Size, tuple[int, ...]]]  # shapes and strides, which may change on one rank alone

    @classmethod
    def of(cls, named: Named) -> FlatBucket:
        tensors = named.values()
        return cls(named, [memory_of(t).numel() for t in tensors], [(t.shape, t.stride()) for t in tensors])

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.named.values())).dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        return sum_dtype(self.dtype)

    def new_flat(self) -> torch.Tensor:
        return torch.empty(self.numel, dtype=self.sum_dtype, device=next(iter(self.named.values())).device)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Its parts, with the shapes and strides that the tensors had; they must be real."""
        return [part.as_strided(*layout) for part, layout in zip(flat.split(self.sizes), self.layouts, strict=True)]

    def pack(self, flat: torch.Tensor) -> None:
        _torch.foreach_copy_(list(flat.split(self.sizes)), [memory_of(t) for t in self.named.values()])

    def unpack(self, flat: torch.Tensor) -> None:
        _torch.foreach_copy_([memory_of(t) for t in self.named.values()], list(flat.split(self.sizes)))


def check_cap(cap_mb: float) -> None:
    check_number("bucket_cap_mb", cap_mb, lambda cap: cap > 0, "above 0")


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
        self._who, self._group, self._cap_mb = who, process_group, cap_mb
        self.traffic = Traffic(0, 0)
        self._device = next(iter(named.values())).device
        self._exchange = Exchange(process_group, self._device)
        self._planned: list[tuple[int, torch.dtype, int]] = []
        self.use(named)

    def use(self, named: Named) -> None:
        """Average these from now on. They may be the same objects with other data: a module was converted."""
        planned = [(id(tensor), tensor.dtype, tensor.numel()) for tensor in named.values()]
        if planned == self._planned:
            return
        self._planned, self.buckets = planned, plan_buckets(named, self._cap_mb)
        largest: dict[torch.dtype, int] = {}
        for bucket in self.buckets:
            largest[bucket.sum_dtype] = max(largest.get(bucket.sum_dtype, 0), bucket.numel)
        self._scratch = {dtype: torch.empty(n, dtype=dtype, device=self._device) for dtype, n in largest.items()}

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
    is_known = any(words in str(error) for words in (" died: ", " is gone"))
    advice = "" if is_known else "All ranks must take the same number of steps. "
    return TransportError(
        f"{error}\nrank {process_group.rank()}: {who} could not average {what} ({shown}) at step {step}. {advice}"
        "Parameters may be partly averaged: go back to a checkpoint."
    )
