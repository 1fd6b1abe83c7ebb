"""What DistributedDataParallel is made of: transport, reducer, logger, and a model that starts equal on all ranks."""

from __future__ import annotations

import datetime
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp import _C
from torchddp.ddp import bucket_sizes, buffer_sync, model_check, wrapped_model
from torchddp.ddp.logger import DDPLogger
from torchddp.ddp.parameter_watch import ParameterWatch
from torchddp.ddp.session import ModelSession
from torchddp.diagnose import hang_reports, nonfinite
from torchddp.diagnose.hang_reports import HangReports
from torchddp.diagnose.nonfinite import NonFiniteFinder
from torchddp.diagnose.parameters import ParameterCheck
from torchddp.plan import model_plan
from torchddp.plan.auto_plan import AutoPlan
from torchddp.transport import interruptible, select


class DDPConstruction(TorchDDP):
    """The part of the wrapper that torch's constructor, unpickling and a change of the process group call."""

    reducer: _C.Reducer  # type: ignore[assignment]  # torch's stubs know only their own
    logger: Any

    # From the arguments, before torch's constructor runs.
    _transport_choice: str
    _wire_dtype: torch.dtype | None
    _timeout: datetime.timedelta | None
    _stall_report_s: float | None
    _measures_gradients: bool
    _check_parameters_every: int | None
    _find_nonfinite: bool | str
    _views_asked_for: bool
    _sync_at_init: bool
    _is_copy: bool
    _init_sync_buffers: bool
    _plans_itself: bool
    _caps_asked_for: list[float]
    _observers: tuple[HangReports | NonFiniteFinder | ParameterCheck, ...] = ()
    # Changed by what comes after.
    _group_without_rank: bool = False
    _has_builtin_hook: bool = False
    # What buckets of one owner travel as, if they are float32.
    _reduce_dtype: torch.dtype | None = None

    def _ddp_init_helper(
        self,
        parameters: list[torch.Tensor],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        """Called by torch's constructor and by unpickling: builds ``self.reducer`` and ``self.logger``."""
        if not isinstance(self.process_group, dist.ProcessGroup):
            raise TypeError(
                f"process_group must be a process group that this rank is in, got {type(self.process_group).__name__} "
                f"{self.process_group!r}; new_group() gives no group to ranks that it leaves out"
            )
        names = [param_to_name_mapping[i].removeprefix(".") for i in range(len(parameters))]
        together = self._sync_at_init
        self._stall_limit_s()  # before anything is sent
        transport = self._open_transport(parameters, names)
        if self.mixed_precision is not None:
            for index, parameter in enumerate(parameters):
                parameter._idx = index  # type: ignore[attr-defined]  # torch's mixed-precision hooks pass it back
        buffer_broadcast = self._reserve_for_buffers(transport)  # before the reducer, in which ranks agree on memory
        owners = self._owners(parameters)
        specs = self._specs = wrapped_model.param_specs(parameters, names, expect_sparse_gradient, owners)
        self._bucket_caps_bytes, solo_bytes = self._choose_caps(parameters, transport)
        self.reducer = _C.Reducer(
            parameters,
            specs,
            self.process_group,
            transport,
            caps_bytes=self._bucket_caps_bytes,
            solo_bytes=solo_bytes,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            gradients_share_storage=self._views_asked_for,
            skip_all_reduce_unused_params=self.skip_all_reduce_unused_params,
            compiled_autograd_takes_over=self._use_python_reducer,
            wire_dtype=self._wire_dtype,
            reduce_dtype=self._reduce_dtype,
            gradient_stats=self._measures_gradients,
            find_nonfinite=bool(self._find_nonfinite),
            raise_nonfinite=self._find_nonfinite == nonfinite.RAISE,
            timeout=self._wait_limit(),
        )
        self._reduced_params = parameters
        self._reduced_ids = {id(p) for p in parameters}
        # torch's mixed precision puts other tensors in the place of parameters, in every step.
        watched = parameters if self.mixed_precision is None else []
        self._parameter_watch = ParameterWatch(self.module, watched, names[: len(watched)])
        self._auto_plan: AutoPlan | None = None
        if self._plans_itself:
            model_plan.start(self, look_for_kept=together)
        self._adopt_group(buffer_broadcast if self.reducer.transport is transport else None)
        self._observe_steps()
        self._has_sync_batch_norm = any(isinstance(m, torch.nn.SyncBatchNorm) for m in self.module.modules())
        self.logger = DDPLogger(self.reducer, self.process_group)
        self.logger.log_construction(self, parameters)
        self._passing_sync_batchnorm_handle(self.module)

    def _owners(self, parameters: list[torch.Tensor]) -> list[int] | None:
        """The rank that alone gets each parameter's average; None: all ranks get all."""
        return None

    def _choose_caps(self, parameters: list[torch.Tensor], transport: _C.Transport) -> tuple[list[int], int]:
        return bucket_sizes.choose(self._caps_asked_for, parameters, transport)

    def _adopt_group(self, buffer_broadcast: _C.TensorBroadcast | None = None) -> None:
        self._own_rank = self.process_group.rank()
        self._buffer_broadcast = buffer_broadcast or self._broadcast_over(self.reducer.transport)
        interruptible.register(self)

    def interrupt(self, reason: str) -> None:
        """From any thread, not collective: waits for other ranks here, now or later, raise TransportError(reason).

        Peers hear of it as of a rank that is gone. The model can only go on over another process group.
        """
        self.reducer.transport.interrupt(reason)

    def _observe_steps(self) -> None:
        for old in self._observers:
            old.close()
        self.session = session = ModelSession(
            weakref.ref(self),
            self.reducer,
            self._specs,
            self._reduced_params,
            self.process_group,
            self._is_copy,
            self._reduced_params[0].device,
            self._wait_limit(),
            self._own_rank,
        )
        every = self._check_parameters_every
        self._hang_reports = HangReports(session, self._stall_report_s)
        self._nonfinite_finder = NonFiniteFinder(session) if self._find_nonfinite else None
        self._parameter_check = None if every is None else ParameterCheck(session, every)
        observers = (self._hang_reports, self._nonfinite_finder, self._parameter_check)
        self._observers = tuple(observer for observer in observers if observer is not None)

    def _stall_limit_s(self) -> float:
        return hang_reports.limit_of(self._stall_report_s, self._timeout, self.process_group, self.device_type)

    def _open_transport(self, parameters: list[torch.Tensor], names: list[str]) -> _C.Transport:
        """Collective, unless ``init_sync=False`` or this is a copy: then c10d, which needs no agreement."""
        sync, self._sync_at_init = self._sync_at_init, False  # a copy does not synchronise, as torch's does not
        choice = select.intended_transport(
            self._transport_choice, self.process_group, [p.device for p in parameters], collective=sync
        )
        if self._is_copy:
            choice = "c10d"
        if sync:
            model_check.verify_same_model(parameters, names, self.process_group, self.device, choice)
        transport = select.open_transport(
            choice, self.process_group, device=parameters[0].device, timeout=self._timeout
        )
        return self._sync_module(transport, 0, buffers=self._init_sync_buffers) if sync else transport

    def _sync_module(self, transport: _C.Transport, src: int, *, buffers: bool) -> _C.Transport:
        """The transport, or the one that the ranks went on with because some had no room for a message."""
        states = list(buffer_sync.states_of(self.module, self.parameters_to_ignore, buffers=buffers))
        if transport.size == 1 or not states:
            return transport
        if _C.can_travel_as_bytes(states):
            broadcast = self._broadcast_over(transport)
            broadcast.reserve(states)
            agreed = _C.agree_on_memory(transport, self._wait_limit())
            (broadcast if agreed is transport else self._broadcast_over(agreed)).run(states, src)
            return agreed
        _sync_module_states(
            module=self.module,
            process_group=self.process_group,
            broadcast_bucket_size=self.broadcast_bucket_size,
            src=src,
            params_and_buffers_to_ignore=self.parameters_to_ignore,
            broadcast_buffers=buffers,
        )
        return transport

    def _reserve_for_buffers(self, transport: _C.Transport) -> _C.TensorBroadcast:
        broadcast = self._broadcast_over(transport)
        if transport.size > 1 and self.modules_buffers and _C.can_travel_as_bytes(self.modules_buffers):
            broadcast.reserve(self.modules_buffers)
        return broadcast

    def _broadcast_over(self, transport: _C.Transport) -> _C.TensorBroadcast:
        return _C.TensorBroadcast(transport, self.broadcast_bucket_size, self._wait_limit())

    def _wait_limit(self) -> datetime.timedelta:
        return self._timeout or datetime.timedelta(0)  # zero: the process group's own

    def _share_gradients_with(self, inner: list[TorchDDP]) -> None:
        """Two reducers of one parameter: each must copy its average back, for one ``.grad`` can't be in two buckets."""
        for other in inner:
            if isinstance(other, DDPConstruction):
                other.reducer.disable_views()
                other.gradient_as_bucket_view = False
