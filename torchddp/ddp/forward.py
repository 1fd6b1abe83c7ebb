"""What torch's class does around a module's forward, with our reducer: inputs, buffers, and the step's beginning."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.distributed.algorithms.join import Join
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp import _C, _torch
from torchddp.ddp import model, refresh, wrapper

Inputs = tuple[tuple[object, ...], dict[str, object]]  # of a forward: by place, by name
logger = logging.getLogger("torchddp.distributed")


def _torchs_forward() -> Callable[..., Any] | None:
    """None if a profiler, say, has already replaced it."""
    code = getattr(TorchDDP.forward, "__code__", None)
    return TorchDDP.forward if getattr(code, "co_filename", "") == inspect.getfile(TorchDDP) else None


_TORCHS_FORWARD = _torchs_forward()


def _timed(call: Callable[..., None], *args: object, **kwargs: object) -> int:
    """Make the call and return the nanoseconds that it took."""
    begun_ns = time.perf_counter_ns()
    call(*args, **kwargs)
    return time.perf_counter_ns() - begun_ns


class Forward(wrapper.Wrapper):
    """The methods of `torchddp.DistributedDataParallel` that torch's class calls in a forward."""

    @property
    def _called(self) -> torch.nn.Module:
        """What the program calls."""
        return self

    def forward(self, *inputs: object, **kwargs: object) -> Any:
        """Return ``module(*inputs, **kwargs)``, between ``_pre_forward`` and ``_post_forward``."""
        if self._use_python_reducer:  # traced by the compiler, which then has a single graph
            return super().forward(*inputs, **kwargs)
        return self._untraced_forward(*inputs, **kwargs)

    @_torch.disable_dynamo(recursive=False)
    def _untraced_forward(self, *inputs: object, **kwargs: object) -> Any:
        if TorchDDP.forward is not _TORCHS_FORWARD:
            return super().forward(*inputs, **kwargs)
        if _torch.profiler_enabled():
            with record_function("DistributedDataParallel.forward"):
                return self._forward_of_step(*inputs, **kwargs)
        return self._forward_of_step(*inputs, **kwargs)

    def _forward_of_step(self, *inputs: object, **kwargs: object) -> object:
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    def _run_ddp_forward(self, *inputs: object, **kwargs: object) -> object:
        """As torch's, which subclasses override, without the cost of its context manager."""
        if self._use_python_reducer:
            return super()._run_ddp_forward(*inputs, **kwargs)
        outer = TorchDDP._active_ddp_module
        TorchDDP._active_ddp_module = self
        try:
            return self.module(*inputs, **kwargs)
        except BaseException as error:
            self.observers.on_error(error)
            raise
        finally:
            TorchDDP._active_ddp_module = outer

    def _pre_forward(self, *inputs: object, **kwargs: object) -> Inputs:
        if self._use_python_reducer:
            prepared: Inputs = super()._pre_forward(*inputs, **kwargs)
            return prepared
        return self._before_module(*inputs, **kwargs)

    # Traced by the compiler, this would be compiled again in each step, because it counts steps and nanoseconds.
    @_torch.disable_dynamo(recursive=True)
    def _before_module(self, *inputs: object, **kwargs: object) -> Inputs:
        if not self._lazy_init_ran and not torch.compiler.is_compiling():
            wrapper.check_outer(self, TorchDDP._active_ddp_module)
            self._lazy_init()
        if torch.is_grad_enabled():
            self._begin_step()
        if self._check_sync_bufs_pre_fwd():
            self.session.waited_ns += _timed(self._sync_buffers)
        if self._join_config.enable:
            # Tells ranks that have run out of inputs whether this step will be reduced.
            self.session.waited_ns += _timed(self._check_global_requires_backward_grad_sync, is_joined_rank=False)
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            moved, moved_kwargs = _torch.to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)
            inputs, kwargs = moved[0], moved_kwargs[0]
        if self.mixed_precision is not None:
            inputs, kwargs = _torch.cast_forward_inputs(self.mixed_precision.param_dtype, *inputs, **kwargs)
        return inputs, kwargs

    def _post_forward(self, output: object) -> object:
        if self._use_python_reducer:
            return super()._post_forward(output)
        return self._after_module(output)

    @_torch.disable_dynamo(recursive=True)
    def _after_module(self, output: object) -> object:
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        graph = torch.is_grad_enabled()
        reduced = graph and self.require_backward_grad_sync
        search = graph and self.find_unused_parameters and not self.static_graph
        if reduced:
            search_from = self._search_from(output) if search else []
            self.reducer.prepare_for_backward(search_from, self.session.has_backward_hooks)
        # Only in steps of a static graph that are reduced: under no_sync() it would end the recording too early.
        if search or (reduced and self.static_graph and self.reducer.records_graph()):
            output = _torch.through_sink(self, output, self.reducer.meet_sink if self.static_graph else None)
        if graph:
            self.observers.after_forward(output)
        if self.require_forward_param_sync != reduced:  # nn.Module is slow to set attributes
            self.require_forward_param_sync = reduced
        self._clear_grad_buffer()
        return output

    # Torch's sink sets it, but must ask the reducer again after the backward of autograd.grad(), which records nothing.
    _static_graph_delay_allreduce_enqueued = property(
        lambda self: not self.reducer.records_graph(), lambda self, value: None
    )

    def _search_from(self, output: object) -> list[torch.Tensor]:
        """Where the search for unused parameters starts."""
        return list(_torch.find_tensors(output))

    def _begin_step(self) -> None:
        if self._options.auto_refresh_trainable:
            waited_ns = _timed(refresh.refresh_if_changed, self)
            self.session.waited_before_ns += waited_ns  # perhaps of a new session
        if self._siblings:
            wrapper.share_with_siblings(self)
        try:
            self.session.begin_step()
            if self._join_config.enable and (work := Join.notify_join_context(self)):
                self.reducer.set_forward_pass_work_handle(work, bool(self._divide_by_initial_world_size))
            # Before forward, where memory use is lowest; once per training run.
            if not self._has_rebuilt_buckets and self.reducer.rebuild_buckets():
                self._has_rebuilt_buckets = True
                logger.info("Reducer buckets have been rebuilt in this iteration.")
        except RuntimeError as error:
            changed = model.describe_changes(self, self.session.reduced_ids)
            if not changed or "Expected to have finished reduction" not in str(error):  # which has another cause
                raise
            raise RuntimeError(f"{changed}\n{error}") from None
        self.observers.before_step()

    # Buffers are synchronized as in torch, but faster: torch looks up ``buffer_hook`` several times per forward, and on
    # a model without it each lookup raises inside nn.Module, which takes longer than everything else here.

    @property
    def _has_buffer_hook(self) -> bool:
        return "buffer_hook" in self.__dict__

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return bool(super()._check_sync_bufs_pre_fwd() if self._has_buffer_hook else self.will_sync_module_buffers())

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self._has_buffer_hook and bool(super()._check_sync_bufs_post_fwd())

    def _sync_buffers(self) -> None:
        # Same order as torch: under join(), all ranks first agree on whose buffers are authoritative.
        root = self._find_common_rank(self._distributed_rank, True) if self._join_config.enable else 0
        had_grad = torch.is_grad_enabled()
        _torch.set_grad_enabled(False)  # torch.no_grad() takes microseconds
        try:
            self._assign_modules_buffers()
            self._sync_module_buffers(root)
        finally:
            _torch.set_grad_enabled(had_grad)

    def _assign_modules_buffers(self) -> None:
        """As torch's, which subclasses override. Called before each broadcast: buffers may have been reassigned."""
        session = self.__dict__.get("session")
        if session is None or not session.is_open or self.parameters_to_ignore or self._has_buffer_hook:
            super()._assign_modules_buffers()  # with names, and slower
            self.named_module_buffers = {name: model.local_of(b) for name, b in self.named_module_buffers.items()}
            self.modules_buffers = list(self.named_module_buffers.values())
        else:
            self.__dict__["modules_buffers"] = model.buffers_of(self.module)  # nn.Module.__setattr__ is slow

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        if not self._has_buffer_hook:
            self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)
            return
        self.session.agree_once()
        # An in-place update must not invalidate the backward of an earlier forward.
        with _torch.keep_versions(tuple(self.modules_buffers)):
            super()._sync_module_buffers(authoritative_rank)

    def _default_broadcast_coalesced(
        self, bufs: list[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        self.session.agree_once()
        if self.process_group.size() > 1 and (self.modules_buffers if bufs is None else bufs):
            super()._default_broadcast_coalesced(bufs, bucket_size, authoritative_rank)

    def _distributed_broadcast_coalesced(
        self, tensors: list[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        if _C.can_travel_as_bytes(tensors):
            self.session.sync_buffers(tensors, authoritative_rank)
            return
        with torch.no_grad(), _torch.keep_versions(tuple(tensors)):
            super()._distributed_broadcast_coalesced(tensors, buffer_size, authoritative_rank)

    def _delayed_all_reduce_hook(self, grad: torch.Tensor) -> torch.Tensor:
        """torch's version never waits for the all-reduce, so over gloo the optimizer may read unfinished sums."""
        late = self._delay_grad_buffer
        assert late is not None  # torch registers this hook after making the buffer
        late.div_(self.process_group.size())
        work = dist.all_reduce(late, group=self.process_group, async_op=True)
        _torch.at_end_of_backward(work.wait)
        return grad
