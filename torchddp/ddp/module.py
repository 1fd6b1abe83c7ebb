"""DistributedDataParallel: torch's module over the compiled reducer."""

from __future__ import annotations

import datetime
import inspect
import logging
import weakref
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs
from torch.nn.parallel.distributed import (
    DistributedDataParallel as TorchDDP,
)
from torch.nn.parallel.distributed import (
    _DDPSink,
    _find_tensors,
    _tree_flatten_with_rref,
    _tree_unflatten_with_rref,
)

from torchddp import comm_hooks
from torchddp.ddp import bucket_sizes, sync_strategy, wrapped_model
from torchddp.ddp.ddp_buffers import DDPBuffers
from torchddp.ddp.ddp_groups import DDPGroups
from torchddp.ddp.ddp_modes import DDPModes
from torchddp.ddp.ddp_steps import DDPSteps
from torchddp.ddp.sync_strategy import DDPSyncStrategy
from torchddp.diagnose import last_exception, nonfinite, stall_limit
from torchddp.diagnose.parameters import ParameterCheck
from torchddp.errors import warn_user
from torchddp.plan import model_plan
from torchddp.traffic import Traffic, of_model
from torchddp.transport import select

__all__ = ["DistributedDataParallel"]

logger = logging.getLogger(__name__)

TORCH_ARGUMENTS = frozenset(inspect.signature(TorchDDP.__init__).parameters)
BUFFERS_RENAMED = "forward_sync_buffers" in TORCH_ARGUMENTS  # torch 2.13 deprecates broadcast_buffers


class DistributedDataParallel(DDPModes, DDPGroups, DDPBuffers, DDPSteps):
    r"""``torch.nn.parallel.DistributedDataParallel`` with another engine; every argument of torch's class, in its
    order.

    Gradients are packed into buckets by autograd hooks in C++, scaled by ``1 / world_size`` on the way in, summed
    over the ranks of ``process_group`` while backward goes on, and are final when ``backward()`` returns.
    Construction, the first forwards, and every synchronised backward are collective: each rank must reach them in the
    same order.

    What differs from torch's class:

    * ``gradient_as_bucket_view`` defaults to None: ``param.grad`` is bucket memory, there is no second copy of the
      gradients, and nothing is copied back; yet a program sees what it sees with torch's default. What it keeps of a
      ``.grad`` set to None stays as it was (the next step copies it), and a tensor that it assigned to ``.grad`` and
      holds gets the averages. ``True``: views that change with the next step, as torch's do. ``False``: copies.
    * ``find_unused_parameters=True`` and ``static_graph=True`` rebuild buckets by the measured order too.
    * ``bucket_cap_mb=None``: a first bucket of 1 MiB, then 25 MiB (models on CPU: 8 MiB, and a gradient of 1 MiB or
      more has a bucket of its own and is reduced where it lies; over shared memory: 1 MiB, and 256 KiB;
      ``bucket_bytes_cap``, which torch's compiler reads, says 25 MiB as in torch). A number given explicitly holds for
      every bucket, the first included (torch does the same). Fractions are allowed; zero and negative numbers raise
      ValueError. ``"auto"``: the buckets with the least exposed time for this model and group: a plan that ``torchddp
      tune`` has kept, or else one made after eight synchronised steps, of which the last five were measured (they
      overlap nothing, and the last ends with up to a second of timing messages). See :meth:`replan`.
    * ``batched_grad_copy`` is accepted and changes nothing: packing never goes through one operator a parameter.
    * ``bf16_compress_hook`` works on CPU models too.

    Args:
        transport: what moves buckets between ranks. ``"c10d"``: the process group itself. ``"shm"``: memory that the
            ranks of a host share, for models on CPU (several hosts: shared inside each, the process group between
            them). ``"nccl"``: a NCCL communicator and a stream of its own, for models on one CUDA device a rank. Both
            raise RuntimeError where that is impossible. ``"auto"``: shared memory if the process group is gloo's and
            all ranks can, NCCL for a CUDA model if the process group is NCCL's and all ranks can, c10d otherwise; also
            c10d with ``init_sync=False``, and for copies (pickle, deepcopy), which may be made by one rank alone. The
            environment variable TORCHDDP_TRANSPORT chooses where this says "auto".
        wire_dtype: ``torch.bfloat16`` or ``torch.float16``: fp32 gradients travel in 16 bits and are summed in fp32;
            the same values on all ranks, but not those of full precision. Over shared memory only (RuntimeError
            otherwise; the hook ``bf16_compress_hook`` works everywhere). Two hosts send half as much to each other; of
            more, every host sends its part to every other. None: as they are.
        timeout: how long a reduction may take, e.g. ``datetime.timedelta(seconds=30)``; None: the process group's own
            limit. A peer that dies or stalls raises :class:`torchddp.TransportError`, naming rank, bucket and
            parameters.
        stall_report_s: seconds that a reduction may wait before the ranks tell each other, through the process group's
            store, where they are, and one of them logs why they stand still (``docs/hang_reports.md``). 0: no reports.
            None: the environment variable TORCHDDP_STALL_REPORT_S, or else the lesser of 60 and a third of the timeout.
        gradient_stats: measure every bucket once it is reduced; see :meth:`gradient_stats`.
        check_parameters_every: every so many synchronised steps, before forward, compare the parameters of all ranks
            by a hash (collective); a difference raises :class:`torchddp.DesyncError` on all. Not once ``join()`` was
            entered. None: never. See :func:`torchddp.check_parameters`.
        find_nonfinite: look for infinities and NaNs in this rank's own gradients while they are packed; see
            :meth:`nonfinite`. ``"raise"``: also raise FloatingPointError on all ranks at the end of a backward whose
            averages are not all finite (not with ``join()``; on a CUDA device backward then waits).
        comm_hook: as :meth:`register_comm_hook` with it: a hook ``hook(state, bucket)`` whose state is None, a tuple
            ``(state, hook)``, or the name of one of ``torchddp.comm_hooks``.
        sync: how ``torchddp.sync`` reduces accumulated microbatches, a ``DDPSyncStrategy`` or its name. None:
            SINGLE_AUTO_SYNC, and MULTI_AUTO_SYNC with ``find_unused_parameters``.

    Memory per rank: the gradients (as buckets); with ``wire_dtype`` half as much again; over shared memory also up to
    three more gradients of each size from 256 KiB on (those are allocated there by autograd, and not copied); one int32
    a parameter with ``find_unused_parameters`` or ``static_graph``.

    Raises:
        TypeError: a ``comm_hook`` or ``process_group`` that is none.
        ValueError: a bucket cap that is text or not positive, a ``stall_report_s`` that is negative or not below the
            timeout, an unknown transport or ``sync``, mixed device types, a wrong ``check_parameters_every`` or
            ``find_nonfinite``.
        RuntimeError: no parameter requires grad; ranks whose models differ (names the parameters and ranks).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | str | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool | None = None,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        transport: str = "auto",
        wire_dtype: torch.dtype | None = None,
        timeout: datetime.timedelta | None = None,
        stall_report_s: float | None = None,
        gradient_stats: bool = False,
        check_parameters_every: int | None = None,
        find_nonfinite: bool | str = False,
        comm_hook: object = None,
        sync: DDPSyncStrategy | str | None = None,
    ) -> None:
        bucket_sizes.check_caps(bucket_cap_mb, bucket_cap_mb_list)
        hook = None if comm_hook is None else comm_hooks.resolve(comm_hook)
        nonfinite.check_choice(find_nonfinite)
        select.check_choice(transport)
        stall_limit.check(stall_report_s)
        if wire_dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"wire_dtype must be torch.bfloat16, torch.float16 or None, got {wire_dtype!r}")
        views = gradient_as_bucket_view is None or bool(gradient_as_bucket_view)
        inner = wrapped_model.wrapped_inside(module)
        if inner:
            views = False
        # Set before Module.__init__: torch's constructor builds the reducer, which reads them. Plain attributes only.
        self._transport_choice = transport
        self._wire_dtype = wire_dtype
        self._timeout = None if timeout is None else min(timeout, select.LONGEST_TIMEOUT)
        self._stall_report_s = stall_report_s
        self._measures_gradients = gradient_stats
        self._parameter_check = None if check_parameters_every is None else ParameterCheck(check_parameters_every)
        self._find_nonfinite = find_nonfinite
        self.sync_strategy = sync_strategy.choose(sync, find_unused_parameters)
        self._views_asked_for = bool(gradient_as_bucket_view)
        self._sync_at_init = init_sync
        self._is_copy = False
        self._init_sync_buffers = forward_sync_buffers is not None or broadcast_buffers is not False
        self._plans_itself = bucket_cap_mb == bucket_sizes.AUTO
        cap_mb = None if isinstance(bucket_cap_mb, str) else bucket_cap_mb
        self._caps_asked_for: list[float] = list(bucket_cap_mb_list or ()) or ([] if cap_mb is None else [cap_mb])
        if BUFFERS_RENAMED:
            # Here, not in torch's constructor, for which this line would be the user's.
            forward_sync_buffers = _forward_sync_buffers(forward_sync_buffers, broadcast_buffers)
            broadcast_buffers = None
        if check_reduction:
            warn_user(
                "The `check_reduction` argument in `DistributedDataParallel` module is deprecated: it does nothing. "
                "Leave it out.",
                FutureWarning,
            )
        arguments = _only_torch_arguments(
            device_ids=device_ids,
            output_device=output_device,
            dim=dim,
            broadcast_buffers=broadcast_buffers,
            init_sync=False,  # done in _ddp_init_helper, with errors that name parameters and ranks
            process_group=process_group,
            bucket_cap_mb=cap_mb,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=views,
            static_graph=static_graph,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            device_mesh=device_mesh,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            bucket_cap_mb_list=bucket_cap_mb_list,
            batched_grad_copy=batched_grad_copy,
            forward_sync_buffers=forward_sync_buffers,
        )
        super().__init__(module, **arguments)
        self._share_gradients_with(inner)
        if hook is not None:
            self.register_comm_hook(*hook)

    # --- bucket plans ---

    def replan(self) -> None:
        """Measure the next eight synchronised steps and plan the buckets anew, whatever they were made by.

        Not collective, but every rank must call it before the same step; the planning itself is. Use it when the
        model's speed or the network has changed. Between now and then no rank may run a forward that the others do
        not, unless without gradients. A model under ``join()`` or with a communication hook keeps its buckets, and so
        does one of which a step was captured in a CUDA graph.
        """
        model_plan.start(self, look_for_kept=False)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["_buffer_broadcast"], state["_auto_plan"], state["_specs"]
        del state["_hang_monitor"], state["_nonfinite_finder"], state["_parameter_watch"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_is_copy": True})
        # The new reducer has neither measured an order nor recorded a static graph.
        self._has_rebuilt_buckets = False
        self._static_graph_delay_allreduce_enqueued = False
        if self._parameter_check is not None:
            self._parameter_check.restart()  # its reducer counts from zero

    def _build_params_for_reducer(self) -> Any:
        # torch compares f"{module}.{parameter}", which for the outermost module begins with a dot that nobody writes.
        self.parameters_to_ignore |= {f".{name}" for name in self.parameters_to_ignore if "." not in name}
        return super()._build_params_for_reducer()

    # --- forward ---

    @torch._disable_dynamo(recursive=False)
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """``module(*inputs, **kwargs)``, with what must happen around it (``_pre_forward``, ``_post_forward``)."""
        if self._use_python_reducer or self._delay_all_reduce_all_params:
            return super().forward(*inputs, **kwargs)
        if torch.autograd._profiler_enabled():
            with record_function("DistributedDataParallel.forward"):
                return self._forward(*inputs, **kwargs)
        return self._forward(*inputs, **kwargs)

    def _forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        outer = TorchDDP._active_ddp_module
        TorchDDP._active_ddp_module = self
        try:
            output = self.module(*inputs, **kwargs)
        except BaseException as error:
            last_exception.note(error, "forward")
            raise
        finally:
            TorchDDP._active_ddp_module = outer
        return self._post_forward(output)

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self._use_python_reducer or self._delay_all_reduce_all_params:
            return super()._pre_forward(*inputs, **kwargs)
        if not self._lazy_init_ran and not torch.compiler.is_compiling():
            wrapped_model.check_outer(self, TorchDDP._active_ddp_module)
            self._lazy_init()
        if torch.is_grad_enabled():
            self._begin_step()
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self._join_config.enable:
            # Ranks that have run out of inputs learn whether this step will be reduced.
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            moved, moved_kwargs = _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)
            inputs, kwargs = moved[0], moved_kwargs[0]
        if self.mixed_precision is not None:
            inputs, kwargs = _cast_forward_inputs(self.mixed_precision.param_dtype, *inputs, **kwargs)
        return inputs, kwargs

    def _post_forward(self, output: Any) -> Any:
        if self._use_python_reducer or self._delay_all_reduce_all_params:
            return super()._post_forward(output)
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        graph = torch.is_grad_enabled()
        reduced = graph and self.require_backward_grad_sync
        search = graph and self.find_unused_parameters and not self.static_graph
        if reduced:
            self.reducer.prepare_for_backward(self._search_from(output) if search else [])
        # A static graph's only in steps that are reduced: under no_sync it would end the recording too early.
        recording = reduced and self.static_graph and not self._static_graph_delay_allreduce_enqueued
        if search or recording:
            output = self._attach_sink(output)
        if self.require_forward_param_sync != reduced:  # nn.Module takes its time to set what is already so
            self.require_forward_param_sync = reduced
        self._clear_grad_buffer()
        return output

    def _search_from(self, output: Any) -> list[torch.Tensor]:
        """Where the search for parameters that a backward won't reach begins."""
        return list(_find_tensors(output))

    def _attach_sink(self, output: Any) -> Any:
        """Route outputs through an autograd node of torch's DDP.

        Its backward is the first to run: it tells when the outermost backward of a static graph's first step begins,
        and hands undefined gradients to the hooks of parameters whose outputs did not take part in the loss.
        """
        tensors, spec, is_rref = _tree_flatten_with_rref(output)
        through = _DDPSink.apply(weakref.ref(self), *tensors)
        # Tensors that no graph leads to stay as they are.
        kept = [t if torch.is_tensor(t) and t.grad_fn is None else s for t, s in zip(tensors, through, strict=True)]
        return _tree_unflatten_with_rref(kept, spec, is_rref)

    @contextmanager
    def no_sync(self):  # type: ignore[no-untyped-def]  # torch declares none either
        """Gradients accumulate locally inside; the first forward-backward after it reduces the sum.

        Include the forward.
        Not collective, but every rank must skip the same steps.
        """
        with super().no_sync():
            yield

    def gradient_stats(self) -> torch.Tensor:
        """What the averaged gradients of the last synchronised backward are like, without another pass by the caller.

        Returns:
            float64 tensor ``[buckets, 2]`` on the model's device: the sum of squares of each bucket, and how many of
            its values are infinite or NaN. Equal on all ranks. ``stats[:, 0].sum().sqrt()`` is the total 2-norm for
            clipping, ``stats[:, 1].sum()`` what a loss scaler looks for; neither waits for the device. Sparse gradients
            count as zero. The next backward writes to the same tensor, unless buckets change before it.

        Raises:
            RuntimeError: the module was not made with ``gradient_stats=True``.
        """
        return self.reducer.gradient_stats()

    def nonfinite(self) -> list[nonfinite.NonFinite]:
        """Where infinite and NaN gradients came from: what ranks had before they averaged, first steps first.

        Not collective. Of each rank the last steps in a row with such gradients, and of each parameter the first: so
        the first entries are the source, and what follows may be due to weights that were spoiled by it. What other
        ranks have found is there when they have begun another forward, or half a second later. Copies of a model
        (pickle, deepcopy) tell of their own rank only.

        Raises:
            RuntimeError: the module was made without ``find_nonfinite``.
        """
        if self._nonfinite_finder is None:
            raise RuntimeError("gradients are only looked at by a DistributedDataParallel with find_nonfinite=True")
        return self._nonfinite_finder.found()

    def traffic(self) -> dict[str, Traffic]:
        """What gradients sent in the last synchronised step, by transport: see :func:`torchddp.traffic.of_model`."""
        return of_model(self)


def _forward_sync_buffers(forward_sync_buffers: bool | None, broadcast_buffers: bool | None) -> bool | None:
    """What the two arguments together mean, and a warning about the one that is deprecated."""
    if broadcast_buffers is None:
        return forward_sync_buffers
    if forward_sync_buffers is not None:
        warn_user(
            "Both `broadcast_buffers` and `forward_sync_buffers` were given: `broadcast_buffers` is deprecated, and "
            "ignored here. Leave it out.",
            FutureWarning,
        )
        return forward_sync_buffers
    warn_user(
        "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead; but forward_sync_buffers=False still "
        "brings rank 0's buffers to all ranks when the model is wrapped, which broadcast_buffers=False does not: keep "
        "that if each rank's buffers are to stay its own.",
        FutureWarning,
    )
    return broadcast_buffers


def _only_torch_arguments(**arguments: Any) -> dict[str, Any]:
    """Drop what the running torch does not know yet, unless the user asked for it."""
    if "forward_sync_buffers" not in TORCH_ARGUMENTS:
        # Before torch 2.13 that is what broadcast_buffers says, which then has no None.
        asked_for = (arguments.pop("forward_sync_buffers"), arguments["broadcast_buffers"])
        arguments["broadcast_buffers"] = next((value for value in asked_for if value is not None), True)
    unknown = {name: value for name, value in arguments.items() if name not in TORCH_ARGUMENTS}
    asked = [name for name, value in unknown.items() if value and name not in ("batched_grad_copy",)]
    if asked:
        raise TypeError(f"torch {torch.__version__} has no DistributedDataParallel argument {asked[0]!r}")
    return {name: value for name, value in arguments.items() if name not in unknown}
