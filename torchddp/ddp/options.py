"""The arguments of DistributedDataParallel: defaults, checks, and derived values."""

from __future__ import annotations

import datetime
import inspect
import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, NewType

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp._torch import MixedPrecision
from torchddp.ddp.grad_precision import MAIN_GRAD, GradPrecision, MainGrads, ReducedWide, WideGrads
from torchddp.errors import warn_user
from torchddp.transport import select

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AUTO = "auto"  # bucket_cap_mb: planned from measurements
RAISE: Final = "raise"  # find_nonfinite, zero_weights: raise instead of warning or returning zeros
STALL_ENV = "TORCHDDP_STALL_REPORT_S"
_DEFAULT_STALL_S = 60.0

# Argument types for type checkers; run-time checks are below.
RegisteredTransport = NewType("RegisteredTransport", str)  # the name of one added by torchddp.transport.select.register
TransportChoice = Literal["auto", "c10d", "shm", "nccl"] | RegisteredTransport
BucketCap = float | Literal["auto"] | None
FindNonfinite = bool | Literal["raise"]
ZeroWeights = Literal["raise", "zeros"]
MainGradsAs = Literal["main_grad", "grad"]
SyncChoice = Literal["single_auto_sync", "multi_auto_sync", "forced_sync"]

# What holds if ranks give an option different values. Where a field says nothing, that is an error on all ranks.
_OWN: Final = {"ranks": "each rank's own"}
_RANK_0S: Final = {"ranks": "rank 0's"}

_TORCH_ARGUMENTS = frozenset(inspect.signature(TorchDDP.__init__).parameters)
# timedelta.max in microseconds, the unit passed to C++, does not fit in 64 bits.
_LONGEST_TIMEOUT = datetime.timedelta(days=100 * 365)

# By main_grads_as.
_PRECISIONS: dict[str, Callable[[], GradPrecision]] = {MAIN_GRAD: MainGrads, "grad": WideGrads}

_MIB = 1024 * 1024
# A CUDA gradient of this size is reduced in place. Packing reads and writes it, which takes 0.7 us at an H100's 3 TB/s
# and 1.3 us at an A100's 1.6 TB/s. One more all-reduce in a group should cost the host about as much (not measured
# yet), and the host runs ahead.
_CUDA_IN_PLACE_BYTES = 1 * _MIB


class DDPSyncStrategy(str, Enum):
    """How and when the gradients of a step with several microbatches are reduced (the names are Composer's).

    Strings name members in any case: ``DDPSyncStrategy("forced_sync")``; ValueError for unknown ones.

    * ``SINGLE_AUTO_SYNC``: during the last microbatch's backward. One reduction per step, overlapped with that
      backward.
    * ``MULTI_AUTO_SYNC``: during each microbatch's backward. As many reductions as microbatches.
    * ``FORCED_SYNC``: all at once after the last microbatch's backward. One reduction per step, fully exposed. Works
      however the parameters are used.
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


@dataclass(frozen=True)
class DDPOptions:
    """Every argument of DistributedDataParallel except the module, in its order; checked on construction.

    All ranks must give an option the same value, unless its field says that each has its own, or that rank 0's holds.

    Those up to ``forward_sync_buffers`` mean what they mean in torch's class, or what DistributedDataParallel says.

    Args:
        bucket_cap_mb: None: a first bucket of 1 MiB, then 25 MiB. On a CPU later buckets are 8 MiB, and gradients of at
            least 1 MiB get a bucket each and are reduced in place. Over shared memory these sizes are 1 MiB and 256
            KiB; they grow, up to 25 MiB, if messages are expensive because of many ranks or few cores, which models
            larger than 1 MiB measure in a few milliseconds. (``bucket_bytes_cap``, which torch's compiler reads, is 25
            MiB as in torch.) A number applies to every bucket including the first, as in torch. Fractions are allowed;
            zero and negative numbers raise ValueError. ``"auto"``: the buckets that expose the least communication time
            for this model and group, from a plan stored by ``torchddp tune``, or made after eight synchronized steps.
            The last five of these are measured without overlap, and then messages are timed for up to a second. See
            `DistributedDataParallel.replan`.
        transport: what moves buckets between ranks. ``"c10d"``: the process group itself. ``"shm"``: memory shared by
            the ranks of a host, for CPU models (with several hosts: shared memory within each, the process group
            between them). ``"nccl"``: our own NCCL communicator and stream, for models on one CUDA device per rank.
            Both raise RuntimeError where they can't work. ``"auto"``: shared memory if the process group is gloo's and
            all ranks can use it; NCCL for a CUDA model if the process group is NCCL's and all ranks can use it;
            otherwise c10d. Also c10d with ``init_sync=False``, and for copies (pickle, deepcopy), which a single rank
            may make. The environment variable TORCHDDP_TRANSPORT replaces "auto". A transport added with
            ``torchddp.transport.select.register`` is chosen by its name (for type checkers
            ``RegisteredTransport(name)``).
        wire_dtype: ``torch.bfloat16`` or ``torch.float16``: send fp32 gradients between hosts in 16 bits, and sum them
            in fp32. All ranks get the same values, with one rounding error per host. Between two hosts it halves the
            traffic; with more, every host sends its part to every other host. Within a host sums are exact: with all
            ranks on one host, this option changes nothing. Over shared memory only (RuntimeError otherwise; the hook
            ``torchddp.comm_hooks.BF16`` works everywhere). None: no conversion.
        timeout: how long a reduction may take, e.g. ``datetime.timedelta(seconds=30)``; None: the process group's
            limit. A peer that dies or stalls raises :class:`torchddp.TransportError`, naming rank, bucket and
            parameters.
        stall_report_s: seconds that a reduction may wait before the ranks exchange their positions through the process
            group's store and one of them logs why they are stuck (``docs/hang_reports.md``). 0: no reports. None: the
            environment variable TORCHDDP_STALL_REPORT_S, or else the smaller of 60 and a third of the timeout.
        gradient_stats: compute statistics of every reduced bucket; see :meth:`gradient_stats`.
        check_parameters_every: before the forward of every n-th synchronized step, compare the parameters of all ranks
            by a hash (collective); a difference raises :class:`torchddp.DesyncError` on all. Stops once ``join()`` was
            used. None: never. See :func:`torchddp.check_parameters`.
        find_nonfinite: look for infinities and NaNs in this rank's own gradients while they are packed; see
            :meth:`nonfinite`. ``"raise"``: also raise FloatingPointError on all ranks at the end of a backward with
            non-finite averages (not with ``join()``; on a CUDA device backward then waits for the device).
        adopt_large_gradients: over NCCL, reduce gradients of 1 MiB and more where autograd allocated them, and pack
            only the smaller ones. ``param.grad`` keeps its memory, as with torch's default, and buckets reserve none
            for it. Not with ``gradient_as_bucket_view=True`` or a communication hook. False packs everything, so
            that NCCL's NVLink SHARP algorithms, which support plain sums only, can reduce it; may be faster between the
            GPUs of a host.
        weighted: every backward has a weight, set with :meth:`weigh` before it, and gradients become sum(weight *
            gradient) / sum(weight) over the ranks and backwards of a step. A backward without one raises RuntimeError.
            False: only steps that call `weigh` are weighted, on all ranks or on none. Required under ``join()``, where
            a rank that has run out of inputs must know that the others send weights.
        zero_weights: what happens in a weighted step in which every rank's weight is 0. ``"raise"``: ValueError on all
            ranks at the end of backward (on a CUDA device, backward then waits). ``"zeros"``: gradients are zeros.
        comm_hook: registered with :meth:`register_comm_hook`: a hook ``hook(state, bucket)`` called with state None, a
            tuple ``(state, hook)``, or the name of a hook in ``torchddp.comm_hooks``.
        sync: how ``torchddp.sync`` reduces accumulated microbatches: a ``DDPSyncStrategy`` or its name. None:
            SINGLE_AUTO_SYNC, or MULTI_AUTO_SYNC with ``find_unused_parameters``.
        reduce_dtype: ``torch.float32``: cast gradients of bfloat16 and float16 parameters to float32 as they enter
            their buckets, scale and sum them over the ranks in float32, and round once, to ``.grad`` in the parameter's
            dtype. Accumulation under ``no_sync()`` still happens in ``.grad``. Buckets take 4 bytes per element, in
            addition to the 2 of ``.grad``. None: no conversion. Other gradients are always reduced in their own dtype.
        main_grads: ``torch.float32``: also accumulate these gradients in float32 over microbatches and ranks (implies
            ``reduce_dtype``). Takes 4 bytes per element, which is the bucket itself; the 16-bit gradient made by
            autograd lives until its hook has run. None: off. ``docs/main_grads.md`` has examples.
        main_grads_as: where they are stored. ``"main_grad"``: in ``parameter.main_grad``, always the same tensor,
            initially zero; ``.grad`` is None after each backward. All parameters have one; those that are not 16-bit
            have it in their own dtype. The wrapper's ``zero_grad()`` clears it, as does ``parameter.main_grad = None``
            before the next forward (which restores the tensor); an optimizer's ``zero_grad()`` does not. ``"grad"``: in
            ``.grad``, which is then float32 (``Tensor.grad_dtype``); everything else works as usual.
        auto_refresh_trainable: in every forward that begins a synchronized step, check whether parameters were frozen,
            thawed, added or removed, and if so call :meth:`refresh_trainable`. Ranks compare results, so that a change
            on only some ranks is an error instead of a hang: an all-gather of one number per step. All ranks must run
            such forwards (those under ``no_grad`` don't count). Not inside ``join()``.

    Raises:
        TypeError, ValueError: a value is not allowed; the message says which values are.
    """

    device_ids: Sequence[int | torch.device] | None = field(default=None, metadata=_OWN)
    output_device: int | torch.device | None = field(default=None, metadata=_OWN)
    dim: int = field(default=0, metadata=_OWN)
    broadcast_buffers: bool | None = None
    init_sync: bool = True
    process_group: dist.ProcessGroup | None = field(default=None, metadata=_OWN)
    bucket_cap_mb: BucketCap = field(default=None, metadata=_RANK_0S)
    find_unused_parameters: bool = False
    check_reduction: bool = field(default=False, metadata=_OWN)
    gradient_as_bucket_view: bool | None = field(default=None, metadata=_OWN)
    static_graph: bool = False
    # Of these two, the names are compared: they are ignored by the reducer.
    delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None = field(default=None, metadata=_OWN)
    param_to_hook_all_reduce: torch.nn.Parameter | None = field(default=None, metadata=_OWN)
    mixed_precision: MixedPrecision | None = None
    device_mesh: DeviceMesh | None = field(default=None, metadata=_OWN)
    skip_all_reduce_unused_params: bool = False
    bucket_cap_mb_list: Sequence[float] | None = field(default=None, metadata=_RANK_0S)
    batched_grad_copy: bool = field(default=False, metadata=_OWN)
    forward_sync_buffers: bool | None = None
    transport: TransportChoice = "auto"
    wire_dtype: torch.dtype | None = None
    timeout: datetime.timedelta | None = field(default=None, metadata=_OWN)
    stall_report_s: float | None = field(default=None, metadata=_OWN)
    gradient_stats: bool = field(default=False, metadata=_OWN)
    check_parameters_every: int | None = None
    find_nonfinite: FindNonfinite = False
    adopt_large_gradients: bool = field(default=True, metadata=_OWN)  # used where all ranks do
    weighted: bool = False
    zero_weights: ZeroWeights = RAISE
    comm_hook: object = None
    sync: DDPSyncStrategy | SyncChoice | None = None
    reduce_dtype: torch.dtype | None = None
    main_grads: torch.dtype | None = None
    main_grads_as: MainGradsAs = MAIN_GRAD
    auto_refresh_trainable: bool = False

    def __post_init__(self) -> None:
        _check_caps(self.bucket_cap_mb, self.bucket_cap_mb_list)
        select.check_choice(self.transport)
        check_stall_report(self.stall_report_s)
        if self.wire_dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"wire_dtype must be torch.bfloat16, torch.float16 or None, got {self.wire_dtype!r}")
        if self.find_nonfinite not in (False, True, RAISE):
            raise ValueError(f'find_nonfinite must be False, True or "raise", got {self.find_nonfinite!r}')
        if self.zero_weights not in (RAISE, "zeros"):
            raise ValueError(f'zero_weights must be "raise" or "zeros", got {self.zero_weights!r}')
        every = self.check_parameters_every
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(
                f"check_parameters_every must be a number of steps, 1 or more, or None for no checks; got {every!r}"
            )
        DDPSyncStrategy._choose(self.sync, self.find_unused_parameters)
        self._check_precision()
        if not isinstance(self.auto_refresh_trainable, bool):
            raise TypeError(f"auto_refresh_trainable must be True or False, got {self.auto_refresh_trainable!r}")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> DDPOptions:
        """Build from a mapping; other keys are ignored."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls) if field.name in arguments})

    def kept(self) -> DDPOptions:
        """A copy without what is only used at construction or what a copy of the model can't have."""
        return replace(
            self,
            process_group=None,
            device_mesh=None,
            delay_all_reduce_named_params=None,
            param_to_hook_all_reduce=None,
            comm_hook=None,
        )

    def _check_precision(self) -> None:
        """ValueError if ``reduce_dtype`` or ``main_grads`` has a bad value or conflicts with another option."""
        for name, dtype in (("reduce_dtype", self.reduce_dtype), ("main_grads", self.main_grads)):
            if dtype not in (None, torch.float32):
                raise ValueError(
                    f"{name} must be torch.float32 or None, got {dtype!r}. (To send float32 gradients in 16 bits there "
                    "are wire_dtype=torch.bfloat16, over shared memory, and the hook torchddp.comm_hooks.BF16)"
                )
        if self.main_grads_as not in _PRECISIONS:
            allowed = ", ".join(map(repr, _PRECISIONS))
            raise ValueError(f"main_grads_as must be one of {allowed}, got {self.main_grads_as!r}")
        if self.main_grads is None and self.main_grads_as != MAIN_GRAD:
            raise ValueError(f"main_grads_as={self.main_grads_as!r} has no effect without main_grads=: set that too")
        precision = self.make_precision()
        if not isinstance(precision, ReducedWide):
            return
        for name in ("mixed_precision", "delay_all_reduce_named_params"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{precision.asked_by} conflicts with {name}=, whose hooks do their own casting or reducing"
                )
        if self.gradient_as_bucket_view not in precision.views_allowed:
            raise ValueError(
                f"{precision.asked_by} conflicts with gradient_as_bucket_view={self.gradient_as_bucket_view}: "
                f"{precision.why_views}"
            )

    # --- other ranks ---

    def compared(self, *, has_buffers: bool) -> dict[str, str]:
        """The values that must be equal on all ranks, in words. ``has_buffers``: the model has some to send."""
        values = {f.name: str(getattr(self, f.name)) for f in fields(self) if not f.metadata}
        del values["transport"]  # what is chosen is compared
        values["sync"] = self.strategy.value
        values["broadcast_buffers"] = str(self.sends_buffers_at_init or not has_buffers)
        values["forward_sync_buffers"] = str(self.sends_buffers_in_forward or not has_buffers)
        return values

    def of_rank_0(self) -> dict[str, Any]:
        """The values for which rank 0's holds on all ranks."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.metadata == _RANK_0S}

    # --- derived values ---

    def make_precision(self) -> GradPrecision:
        """How gradients of 16-bit parameters are reduced and stored, for one session."""
        if self.main_grads is not None:
            return _PRECISIONS[self.main_grads_as]()
        return GradPrecision() if self.reduce_dtype is None else ReducedWide()

    @property
    def strategy(self) -> DDPSyncStrategy:
        return DDPSyncStrategy._choose(self.sync, self.find_unused_parameters)

    @property
    def views(self) -> bool:
        """Whether gradients are bucket memory, unless something prevents it."""
        return self.gradient_as_bucket_view is None or bool(self.gradient_as_bucket_view)

    @property
    def plans_buckets(self) -> bool:
        return self.bucket_cap_mb == AUTO

    @property
    def sends_buffers_at_init(self) -> bool:
        return self.forward_sync_buffers is not None or self.broadcast_buffers is not False

    @property
    def sends_buffers_in_forward(self) -> bool:
        given = self.broadcast_buffers if self.forward_sync_buffers is None else self.forward_sync_buffers
        return given is not False

    @property
    def wait_limit(self) -> datetime.timedelta:
        """The limit of each reduction; zero: the process group's own."""
        return datetime.timedelta(0) if self.timeout is None else min(self.timeout, _LONGEST_TIMEOUT)

    @property
    def asked_caps(self) -> list[int]:
        """The bucket caps in bytes that the user asked for (the last one repeats), or none."""
        cap_mb = None if isinstance(self.bucket_cap_mb, str) else self.bucket_cap_mb
        asked_for = list(self.bucket_cap_mb_list or ()) or ([] if cap_mb is None else [cap_mb])
        return [max(1, int(cap * _MIB)) for cap in asked_for]

    @property
    def in_place_bytes(self) -> int:
        """The size from which a gradient is reduced in place over NCCL; 0: none is."""
        return _CUDA_IN_PLACE_BYTES if self.adopt_large_gradients and not self.gradient_as_bucket_view else 0

    def stall_limit_s(self, group_timeout: datetime.timedelta) -> float:
        """Seconds of waiting after which ranks report why; 0: never. ValueError: see `stall_limit_s`."""
        return stall_limit_s(self.stall_report_s, (self.wait_limit or group_timeout).total_seconds())

    # --- torch's constructor ---

    def for_torch(self, *, views: bool) -> dict[str, Any]:
        """The arguments for the constructor of the installed torch. Warns about deprecated ones.

        Raises:
            TypeError: an argument was given that this torch doesn't have yet.
        """
        if self.check_reduction:
            warn_user(
                "The `check_reduction` argument in `DistributedDataParallel` module is deprecated: it does nothing. "
                "Leave it out.",
                FutureWarning,
            )
        arguments = {field.name: getattr(self, field.name) for field in fields(self)[: _LAST_OF_TORCH + 1]}
        del arguments["check_reduction"]
        arguments |= {
            "init_sync": False,  # done by the session, with errors that name parameters and ranks
            "bucket_cap_mb": None if self.plans_buckets else self.bucket_cap_mb,
            "gradient_as_bucket_view": views,
            **self._buffer_arguments(),
        }
        unknown = {name: value for name, value in arguments.items() if name not in _TORCH_ARGUMENTS}
        asked_for = [name for name, value in unknown.items() if value and name != "batched_grad_copy"]
        if asked_for:
            raise TypeError(f"torch {torch.__version__} has no DistributedDataParallel argument {asked_for[0]!r}")
        return {name: value for name, value in arguments.items() if name not in unknown}

    def _buffer_arguments(self) -> dict[str, bool | None]:
        """Combine the two arguments for buffers, and warn about the deprecated one.

        Done here because in torch's constructor the warning would point to one of our lines.
        """
        new, old = self.forward_sync_buffers, self.broadcast_buffers
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


_LAST_OF_TORCH = [field.name for field in fields(DDPOptions)].index("forward_sync_buffers")


def _check_caps(bucket_cap_mb: float | str | None, bucket_cap_mb_list: Sequence[float] | None) -> None:
    """ValueError for a string other than "auto", a cap that is not positive, or both kinds of caps; TypeError for a
    non-number.
    """
    if isinstance(bucket_cap_mb, str):
        if bucket_cap_mb != AUTO:
            raise ValueError(f"bucket_cap_mb must be a number of MiB, None or {AUTO!r}, got {bucket_cap_mb!r}")
        if bucket_cap_mb_list:
            raise ValueError(f"bucket_cap_mb={AUTO!r} chooses the buckets itself: leave bucket_cap_mb_list out")
        bucket_cap_mb = None
    caps: list[tuple[str, Any]] = [("bucket_cap_mb_list", cap) for cap in bucket_cap_mb_list or []]
    for name, cap in [("bucket_cap_mb", bucket_cap_mb), *caps]:
        if cap is None:
            continue
        if not isinstance(cap, numbers.Real):  # numpy's numbers are Numbers too
            error = ValueError if isinstance(cap, str) else TypeError
            raise error(f"{name} must be a number of MiB, got {cap!r}")
        if not float(cap) > 0:
            raise ValueError(f"{name} must be a positive number of MiB, got {cap!r}")


def stall_limit_s(asked_for_s: float | None, timeout_s: float) -> float:
    """Seconds of waiting after which ranks report why; 0: never.

    Args:
        asked_for_s: set by the user; None: the environment variable TORCHDDP_STALL_REPORT_S, or else the smaller of 60
            and a third of the timeout.
        timeout_s: how long a reduction may take before its waits end anyway.

    Raises:
        ValueError: the given value is not below the timeout, or the variable is not a number of seconds.
    """
    source = "stall_report_s"
    if asked_for_s is None and (text := os.environ.get(STALL_ENV)):
        source = STALL_ENV
        try:
            asked_for_s = float(text)
            check_stall_report(asked_for_s)
        except ValueError:
            raise ValueError(
                f"the environment variable {STALL_ENV} must hold seconds, 0 (no reports) or more; got {text!r}"
            ) from None
    if asked_for_s is None:
        return min(_DEFAULT_STALL_S, timeout_s / 3)
    if asked_for_s >= timeout_s:
        raise ValueError(
            f"{source} is {asked_for_s:g} s, but a reduction fails after {timeout_s:g} s (`timeout`, or the process "
            "group's own), before any report. Use a smaller value, 0 for no reports, or a longer timeout."
        )
    return float(asked_for_s)


def check_stall_report(stall_report_s: object) -> None:
    if stall_report_s is None:
        return
    if isinstance(stall_report_s, bool) or not isinstance(stall_report_s, int | float):
        raise TypeError(
            f"stall_report_s must be a number of seconds, or None; got {type(stall_report_s).__name__} "
            f"{stall_report_s!r}"
        )
    if not math.isfinite(stall_report_s) or stall_report_s < 0:
        raise ValueError(
            f"stall_report_s must be a finite number of seconds, 0 (no reports) or more; got {stall_report_s}"
        )
