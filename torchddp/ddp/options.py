"""What the arguments of DistributedDataParallel mean: checks, and derived values. Its constructor declares them."""

from __future__ import annotations

import datetime
import inspect
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import fields
from enum import Enum
from typing import Any, Final, Literal, NewType

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp import _torch
from torchddp.ddp import checks
from torchddp.ddp.checks import Checks
from torchddp.ddp.former_names import SETTINGS, label
from torchddp.ddp.grad_precision import Precision, ReducedWide
from torchddp.durations import timedelta_of
from torchddp.errors import check_flag, warn_user
from torchddp.transport import select

AUTO = "auto"  # bucket_cap_mb: planned from measurements

# Argument types for type checkers; run-time checks are below.
RegisteredTransport = NewType("RegisteredTransport", str)  # the name of one added by torchddp.transport.select.register
TransportChoice = Literal["auto", "c10d", "shm", "nccl"] | RegisteredTransport
BucketCap = float | Literal["auto"] | None
SyncChoice = Literal["single_auto_sync", "multi_auto_sync", "forced_sync"]

# What holds if ranks give an option different values. For one that is in neither list, that is an error on all ranks.
OF_EACH_RANK: Final = frozenset({
    "device_ids", "output_device", "dim", "process_group", "check_reduction", "gradient_as_bucket_view", "device_mesh",
    "delay_all_reduce_named_params", "param_to_hook_all_reduce",  # the names are compared: the reducer ignores them
    "batched_grad_copy", "timeout",
    "checks.stall_report", "checks.gradient_stats", "checks.traps", "checks.stragglers",
    "transport",  # what is chosen is compared
})  # fmt: skip
_OF_RANK_0: Final = ("bucket_cap_mb", "bucket_cap_mb_list")

# Arguments that torch's constructor doesn't get.
_OURS: Final = frozenset({
    "check_reduction", "transport", "comm_hook", "timeout", "sync", "weighted", "precision", "checks",
    "auto_refresh_trainable",
})  # fmt: skip
_FLAGS: Final = (
    "init_sync", "find_unused_parameters", "check_reduction", "static_graph", "skip_all_reduce_unused_params",
    "batched_grad_copy", "weighted", "auto_refresh_trainable",
)  # fmt: skip
_NOT_KEPT: Final = (
    "process_group", "device_mesh", "delay_all_reduce_named_params", "param_to_hook_all_reduce", "comm_hook",
)  # fmt: skip
_FLAGS_OR_NONE: Final = ("broadcast_buffers", "gradient_as_bucket_view", "forward_sync_buffers")
_TORCH_ARGUMENTS = frozenset(inspect.signature(TorchDDP.__init__).parameters)
# timedelta.max in microseconds, the unit passed to C++, does not fit in 64 bits.
_LONGEST_TIMEOUT = datetime.timedelta(days=100 * 365)

_MIB = 1024 * 1024
_LARGEST_CAP_BYTES = 2**62
# A CUDA gradient of this size is reduced in place. Packing reads and writes it, which takes 0.7 us at an H100's 3 TB/s
# and 1.3 us at an A100's 1.6 TB/s. One more all-reduce in a group should cost the host about as much (not measured
# yet), and the host runs ahead.
_CUDA_IN_PLACE_BYTES = 1 * _MIB


class DDPSyncStrategy(str, Enum):
    """How and when the gradients of a step with several microbatches are reduced (the names are Composer's).

    Strings name members in any case: ``DDPSyncStrategy("forced_sync")``; ValueError for unknown ones.

    * ``SINGLE_AUTO_SYNC``: during the last microbatch's backward. One reduction per step, overlapped with it.
    * ``MULTI_AUTO_SYNC``: during each microbatch's backward. As many reductions as microbatches.
    * ``FORCED_SYNC``: all at once after the last microbatch's backward. One reduction, exposed, for any use of
      parameters.
    """

    SINGLE_AUTO_SYNC = "single_auto_sync"
    MULTI_AUTO_SYNC = "multi_auto_sync"
    FORCED_SYNC = "forced_sync"

    @classmethod
    def _missing_(cls, value: object) -> DDPSyncStrategy:
        if isinstance(value, str) and value.lower() in {member.value for member in cls}:
            return cls(value.lower())
        allowed = ", ".join(repr(member.value) for member in cls)
        raise ValueError(f"unknown sync strategy {value!r}: it must be a DDPSyncStrategy, or one of {allowed}")

    @classmethod
    def _choose(cls, asked_for: DDPSyncStrategy | str | None, find_unused_parameters: bool) -> DDPSyncStrategy:
        """The strategy for a model; ``None`` chooses as Composer's trainer does."""
        if asked_for is not None:
            return cls(asked_for)
        return cls.MULTI_AUTO_SYNC if find_unused_parameters else cls.SINGLE_AUTO_SYNC


class DDPOptions:
    """Every argument of DistributedDataParallel except the module; checked on construction, then immutable.

    All ranks must give an option the same value, unless it is in `OF_EACH_RANK`, or rank 0's holds.

    Args:
        given: all arguments by name.

    Raises:
        TypeError, ValueError: a value is not allowed; the message says which values are.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        _check_types(given)
        precision = given["precision"]
        if precision is not None and not isinstance(precision, Precision):
            raise TypeError(
                f"precision must be a torchddp.Precision or None, got {precision!r}. To send float32 gradients as "
                "bfloat16, for example: precision=torchddp.Precision(wire=torch.bfloat16)"
            )
        self.precision: Final[Precision] = precision or Precision()
        self.checks: Final[Checks] = checks.chosen(given["checks"])
        self._given = {**given, "precision": self.precision, "checks": self.checks}
        self.transport: Final[TransportChoice] = given["transport"]
        self.auto_refresh_trainable: Final[bool] = given["auto_refresh_trainable"]
        self.bucket_cap_mb: Final[BucketCap] = given["bucket_cap_mb"]
        self.bucket_cap_mb_list: Final[Sequence[float] | None] = given["bucket_cap_mb_list"]
        self.gradient_as_bucket_view: Final[bool | None] = given["gradient_as_bucket_view"]
        self.init_sync: Final[bool] = given["init_sync"]
        self.static_graph: Final[bool] = given["static_graph"]
        self.weighted: Final[bool] = given["weighted"]
        self.strategy = DDPSyncStrategy._choose(given["sync"], given["find_unused_parameters"])
        limit = timedelta_of(given["timeout"], "timeout")
        # The limit of each reduction; zero: the process group's own.
        self.wait_limit = datetime.timedelta(0) if limit is None else min(limit, _LONGEST_TIMEOUT)
        _check_caps(self.bucket_cap_mb, self.bucket_cap_mb_list)
        select.check_choice(self.transport)
        self.precision.check()
        self._check_precision()

    def but(self, **changes: Any) -> DDPOptions:
        return DDPOptions({**self._given, **changes})

    def kept(self) -> DDPOptions:
        """A copy without what is only used at construction or what a copy of the model can't have."""
        return self.but(**dict.fromkeys(_NOT_KEPT))

    def _check_precision(self) -> None:
        """ValueError if gradients are reduced in float32, and another option conflicts with that."""
        mode = self.precision.mode()
        if not isinstance(mode, ReducedWide):
            return
        for name in ("mixed_precision", "delay_all_reduce_named_params"):
            if self._given[name] is not None:
                raise ValueError(f"{mode.asked_by} conflicts with {name}=, whose hooks cast or reduce themselves")
        if self.gradient_as_bucket_view not in mode.views_allowed:
            raise ValueError(
                f"{mode.asked_by} conflicts with gradient_as_bucket_view={self.gradient_as_bucket_view}: "
                f"{mode.why_views}"
            )

    def compared(self, *, has_buffers: bool) -> dict[str, str]:
        """The values that must be equal on all ranks, in words. ``has_buffers``: the model has some to send."""
        own = OF_EACH_RANK.union(_OF_RANK_0)
        values = {name: str(value) for name, value in self._given.items() if name not in own.union(SETTINGS)}
        for argument in SETTINGS:  # field by field
            settings = self._given[argument]
            names = [field.name for field in fields(settings) if f"{argument}.{field.name}" not in own]
            values |= {label(argument, name): str(getattr(settings, name)) for name in names}
        values["sync"] = self.strategy.value
        values["broadcast_buffers"] = str(self.sends_buffers_at_init or not has_buffers)
        values["forward_sync_buffers"] = str(self.sends_buffers_in_forward or not has_buffers)
        return values

    def of_rank_0(self) -> dict[str, Any]:
        return {name: self._given[name] for name in _OF_RANK_0}

    @property
    def plans_buckets(self) -> bool:
        return self.bucket_cap_mb == AUTO

    @property
    def sends_buffers_at_init(self) -> bool:
        return self._given["forward_sync_buffers"] is not None or self._given["broadcast_buffers"] is not False

    @property
    def sends_buffers_in_forward(self) -> bool:
        new, old = self._given["forward_sync_buffers"], self._given["broadcast_buffers"]
        return (old if new is None else new) is not False

    @property
    def asked_caps(self) -> list[int]:
        """The bucket caps in bytes that the user asked for (the last one repeats), or none."""
        cap_mb = None if isinstance(self.bucket_cap_mb, str) else self.bucket_cap_mb
        asked_for = list(self.bucket_cap_mb_list or ()) or ([] if cap_mb is None else [cap_mb])
        return [min(max(1, int(cap * _MIB)), _LARGEST_CAP_BYTES) for cap in asked_for]

    @property
    def in_place_bytes(self) -> int:
        """The size from which a gradient is reduced in place over NCCL; 0: none is."""
        return _CUDA_IN_PLACE_BYTES if not self.gradient_as_bucket_view else 0

    def for_torch(self, *, may_be_views: bool) -> dict[str, Any]:
        """The arguments for the installed torch's constructor. TypeError for one that this torch doesn't have yet."""
        if self._given["check_reduction"]:
            warn_user(
                "The `check_reduction` argument in `DistributedDataParallel` module is deprecated: it does nothing. "
                "Leave it out.",
                FutureWarning,
            )
        arguments = {name: value for name, value in self._given.items() if name not in _OURS}
        arguments |= {
            "init_sync": False,  # done by the session, with errors that name parameters and ranks
            "bucket_cap_mb": None if self.plans_buckets else self.bucket_cap_mb,
            "gradient_as_bucket_view": may_be_views and self.gradient_as_bucket_view in (None, True),
            **self._buffer_arguments(),
        }
        unknown = {name: value for name, value in arguments.items() if name not in _TORCH_ARGUMENTS}
        if asked_for := [name for name, value in unknown.items() if value and name != "batched_grad_copy"]:
            raise TypeError(f"torch {torch.__version__} has no DistributedDataParallel argument {asked_for[0]!r}")
        return {name: value for name, value in arguments.items() if name not in unknown}

    def _buffer_arguments(self) -> dict[str, bool | None]:
        """The two arguments for buffers, combined. Warns here: torch's warning would point to a line of ours."""
        new, old = self._given["forward_sync_buffers"], self._given["broadcast_buffers"]
        if "forward_sync_buffers" not in _TORCH_ARGUMENTS:
            # Before torch 2.13, broadcast_buffers covers both and can't be None.
            chosen = new if new is not None else old
            return {"broadcast_buffers": True if chosen is None else chosen, "forward_sync_buffers": None}
        if old is not None and new is not None:
            warn_user(
                "Both `broadcast_buffers` and `forward_sync_buffers` were given: `broadcast_buffers` is deprecated, "
                "and is ignored here. Leave it out.",
                FutureWarning,
            )
        elif old is not None:
            warn_user(
                "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead. With "
                "forward_sync_buffers=False, rank 0's buffers are still copied to all ranks when the model is wrapped. "
                "With broadcast_buffers=False they are not, so keep it if each rank needs its own buffers.",
                FutureWarning,
            )
        return {"broadcast_buffers": None, "forward_sync_buffers": new if new is not None else old}


def _check_types(given: Mapping[str, Any]) -> None:
    """TypeError, or AttributeError where torch's class raises that."""
    for name in (*_FLAGS, *_FLAGS_OR_NONE):
        check_flag(name, given[name], may_be_none=name in _FLAGS_OR_NONE)
    mesh, mixed = given["device_mesh"], given["mixed_precision"]
    if not (mesh is None or isinstance(mesh, dist.DeviceMesh)):
        raise AttributeError(f"device_mesh must be a DeviceMesh or None, got {mesh!r}")
    if not (mixed is None or hasattr(mixed, "param_dtype")):  # FSDP's dataclass will do
        raise AttributeError(f"mixed_precision must be a {_torch.MixedPrecision.__name__} or None, got {mixed!r}")
    if not (given["device_ids"] is None or isinstance(given["device_ids"], Sized)):
        raise TypeError(f"device_ids must be a list of one device, or None; got {given['device_ids']!r:.80}")


def _check_caps(bucket_cap_mb: float | str | None, bucket_cap_mb_list: Sequence[float] | None) -> None:
    """ValueError or TypeError for what is neither positive numbers nor "auto", and for both kinds of caps together."""
    if isinstance(bucket_cap_mb, str):
        if bucket_cap_mb != AUTO:
            raise ValueError(f"bucket_cap_mb must be a number of MiB, None or {AUTO!r}, got {bucket_cap_mb!r}")
        if bucket_cap_mb_list:
            raise ValueError(f"bucket_cap_mb={AUTO!r} chooses the buckets itself: leave bucket_cap_mb_list out")
        bucket_cap_mb = None
    if not (bucket_cap_mb_list is None or isinstance(bucket_cap_mb_list, Iterable)):
        raise TypeError(f"bucket_cap_mb_list must be a list of numbers of MiB, or None; got {bucket_cap_mb_list!r}")
    caps: list[tuple[str, Any]] = [("bucket_cap_mb_list", cap) for cap in bucket_cap_mb_list or []]
    for name, cap in [("bucket_cap_mb", bucket_cap_mb), *caps]:
        if cap is None:
            continue
        if not isinstance(cap, numbers.Real):  # numpy's numbers are Numbers too
            error = ValueError if isinstance(cap, str) else TypeError
            raise error(f"{name} must be a number of MiB, got {cap!r}")
        if not 0 < float(cap) < math.inf:
            raise ValueError(f"{name} must be a positive number of MiB, got {cap!r}")
