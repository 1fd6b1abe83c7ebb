"""The options of torchddp's class as a kwargs handler of Accelerate."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

from torchddp import comm_hooks
from torchddp.ddp.options import (
    BucketCap,
    DDPOptions,
    DDPSyncStrategy,
    FindNonfinite,
    MainGradsAs,
    SyncChoice,
    TransportChoice,
    ZeroWeights,
)

# Options that Accelerate applies itself once the model is wrapped.
_FOR_REGISTERING = ("comm_wrapper", "comm_state_option")


@dataclass
class TorchDDPKwargs(DistributedDataParallelKwargs):
    """``DistributedDataParallelKwargs`` with the arguments that only torchddp's class has.

    Takes effect in :class:`torchddp.integrations.accelerate.Accelerator`, in ``adopt()`` and in ``TorchDDPTrainer``;
    a plain ``accelerate.Accelerator`` raises KeyError. Options and their defaults are those of
    :class:`torchddp.DistributedDataParallel`: gradients are views of buckets, and ``bucket_cap_mb`` depends on the
    device and transport, or with ``"auto"`` on measured steps.

    Args:
        comm_hook: a ``DDPCommunicationHookType`` selects torch's hook, with ``comm_wrapper`` and
            ``comm_state_option`` as in Accelerate. Anything else is passed to torchddp's class as ``comm_hook``: the
            name of one of ``torchddp.comm_hooks`` ("fp16", "bf16", "int8", "powersgd", ...), a hook, or a pair of a
            state and a hook.

    Raises:
        TypeError: an unknown option, or a ``comm_hook`` that is not a hook.
        ValueError: a value that is not allowed.
    """

    broadcast_buffers: bool | None = None
    bucket_cap_mb: BucketCap = None
    gradient_as_bucket_view: bool | None = None
    comm_hook: Any = DDPCommunicationHookType.NO
    skip_all_reduce_unused_params: bool = False
    transport: TransportChoice = "auto"
    wire_dtype: torch.dtype | None = None
    timeout: datetime.timedelta | None = None
    stall_report_s: float | None = None
    gradient_stats: bool = False
    check_parameters_every: int | None = None
    find_nonfinite: FindNonfinite = False
    adopt_large_gradients: bool = True
    sync: DDPSyncStrategy | SyncChoice | None = None
    reduce_dtype: torch.dtype | None = None
    main_grads: torch.dtype | None = None
    main_grads_as: MainGradsAs = "main_grad"
    weighted: bool = False
    zero_weights: ZeroWeights = "raise"

    def __new__(cls, *args: Any, **options: Any) -> TorchDDPKwargs:
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in options if name not in known]
        if unknown:
            raise TypeError(f"{cls.__name__} has no option {unknown[0]!r}: it takes {', '.join(sorted(known))}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        DDPOptions.of(vars(self))  # checks the values
        if self._is_torchs_hook():
            return
        comm_hooks.resolve(self.comm_hook)
        for name in _FOR_REGISTERING:
            value = getattr(self, name)
            if value not in (DDPCommunicationHookType.NO, {}):
                raise ValueError(
                    f"{name}={value!r} goes with a DDPCommunicationHookType, not with comm_hook={self.comm_hook!r}: "
                    "give a hook of torchddp.comm_hooks with its options, such as comm_hooks.PowerSGD(rank=2)"
                )

    def _is_torchs_hook(self) -> bool:
        return isinstance(self.comm_hook, DDPCommunicationHookType)

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments for torchddp's class: the fields that differ from their defaults here."""
        left_out = _FOR_REGISTERING + (("comm_hook",) if self._is_torchs_hook() else ())
        return {name: value for name, value in changed(self).items() if name not in left_out}

    def register_comm_hook(self, model: torch.nn.Module) -> None:
        """Called on the wrapped model, which already has torchddp's own hooks."""
        if self._is_torchs_hook():
            super().register_comm_hook(model)


def changed(handler: DistributedDataParallelKwargs) -> dict[str, Any]:
    """The fields of a handler that differ from the defaults of its class, as the objects themselves, not copies."""
    default = type(handler)()
    values = {field.name: getattr(handler, field.name) for field in dataclasses.fields(handler)}
    return {name: value for name, value in values.items() if not _same(value, getattr(default, name))}


def _same(value: object, default: object) -> bool:
    return value is default or (type(value) is type(default) and value == default)


def merge(
    handler: DistributedDataParallelKwargs | None, options: TorchDDPKwargs | Mapping[str, Any] | None
) -> TorchDDPKwargs:
    """``options``, completed with the fields of ``handler`` that differ from its defaults."""
    if options is not None and not isinstance(options, (DistributedDataParallelKwargs, Mapping)):
        raise TypeError(
            f"options of DistributedDataParallel must be a TorchDDPKwargs or a dict, got {type(options).__name__}"
        )
    before = {} if handler is None else changed(handler)
    asked = dict(options) if isinstance(options, Mapping) else {} if options is None else changed(options)
    return TorchDDPKwargs(**{**before, **asked})
