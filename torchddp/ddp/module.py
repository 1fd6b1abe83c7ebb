"""DistributedDataParallel: torch's module with the compiled reducer behind torch's own extension points."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from torchddp import _torch
from torchddp.ddp import hooks, model, refresh, wrapper
from torchddp.ddp.checks import RAISE, ChecksChoice
from torchddp.ddp.former_names import accepts_former_names
from torchddp.ddp.forward import Forward
from torchddp.ddp.grad_precision import Precision
from torchddp.ddp.logger import DDPLogger
from torchddp.ddp.observers import Observers
from torchddp.ddp.options import BucketCap, DDPOptions, DDPSyncStrategy, SyncChoice, TransportChoice
from torchddp.ddp.session import ReducerPolicy, ReducerSession
from torchddp.ddp.weights import LossKind, weight_and_count
from torchddp.durations import Duration
from torchddp.errors import NonFinite
from torchddp.traffic import Traffic, of_model
from torchddp.transport.agreement import Agreement


class DistributedDataParallel(Forward):
    r"""``torch.nn.parallel.DistributedDataParallel`` on a faster engine, with all its arguments, in their order.

    Autograd hooks in C++ pack gradients into buckets and scale them by ``1 / world_size``. Buckets are summed over the
    ranks of ``process_group`` while backward runs, and gradients are final when ``backward()`` returns. Construction,
    the first forwards, and every synchronized backward are collective: each rank must reach them in the same order.

    Example:

        model = torchddp.DistributedDataParallel(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model(batch)).backward()  # gradients are now averages over all ranks
            optimizer.step()

    Differences from torch's class:

    * ``gradient_as_bucket_view`` defaults to None: ``param.grad`` is bucket memory, without a second copy, yet programs
      see the same values as with torch's default. A gradient kept after setting ``.grad`` to None keeps its values (the
      next step copies it). If the program assigns its own tensor to ``.grad``, the averages go into that. ``True``:
      views that change with the next step, as in torch. ``False``: copies.
    * ``find_unused_parameters=True`` and ``static_graph=True`` also rebuild buckets in the measured gradient order.
    * ``batched_grad_copy`` is accepted and has no effect: packing never uses one operator per parameter.
    * ``bf16_compress_hook`` also works for CPU models.

    Args:
        module: the model. Its parameters and buffers are set to rank 0's.
        device_ids: the CUDA device of the model, in a list; None for a CPU model.
        process_group, device_mesh: the ranks to average over. None: the default group.
        find_unused_parameters: search for parameters that a step doesn't use; otherwise their absence is an error.
        static_graph: every step has the graph of the first one, in which parameters may be unused.
        forward_sync_buffers: send rank 0's buffers before each synchronized forward. None: True.
        init_sync: compare the models and send rank 0's values. False: neither.
        bucket_cap_mb: None: a first bucket of 1 MiB, then 25 MiB. On a CPU later buckets are 8 MiB, and gradients of at
            least 1 MiB get a bucket each and are reduced in place. Over shared memory these sizes are 1 MiB and 256
            KiB, and up to 25 MiB if messages are expensive because of many ranks or few cores, which models larger than
            1 MiB measure in a few milliseconds. (``bucket_bytes_cap`` is 25 MiB as in torch.) A number applies to every
            bucket including the first, as in torch. Fractions are allowed; zero and negative numbers raise ValueError.
            ``"auto"``: the buckets that expose the least communication time, from a plan stored by ``torchddp tune``,
            or made after eight synchronized steps, five of them without overlap, and a second of timing messages. See
            `replan`.
        gradient_as_bucket_view: see above. Over NCCL, True also packs gradients of 1 MiB and more, which are otherwise
            reduced where autograd allocated them; NVLink SHARP, which supports plain sums only, can then reduce them.
        transport: what moves buckets between ranks. ``"c10d"``: the process group itself. ``"shm"``: memory shared by
            the ranks of a host, for CPU models (with several hosts: shared memory within each, the process group
            between them). ``"nccl"``: our own NCCL communicator and stream, for models on one CUDA device per rank.
            Both raise RuntimeError where they can't work. ``"auto"``: shared memory if the process group is gloo's and
            all ranks can use it; NCCL for a CUDA model if the process group is NCCL's and all ranks can use it;
            otherwise c10d. Also c10d with ``init_sync=False``, and for copies (pickle, deepcopy), which a single rank
            may make. The environment variable TORCHDDP_TRANSPORT replaces "auto". A transport added with
            ``torchddp.transport.select.register`` is chosen by name (typed ``RegisteredTransport(name)``).
        comm_hook: as for :meth:`register_comm_hook`: a hook ``hook(state, bucket)`` with state None, a tuple ``(state,
            hook)``, or the name of a hook in ``torchddp.comm_hooks``.
        timeout: how long a reduction may take, in seconds or as a ``datetime.timedelta``; None: the process group's
            limit. A dead or stalled peer raises :class:`torchddp.TransportError`, naming rank, bucket and parameters.
        sync: how ``torchddp.sync`` reduces accumulated microbatches: a ``DDPSyncStrategy`` or its name. None:
            SINGLE_AUTO_SYNC, or MULTI_AUTO_SYNC with ``find_unused_parameters``.
        weighted: every backward has a weight, set with :meth:`weigh` before it, and gradients become sum(weight *
            gradient) / sum(weight) over the ranks and backwards of a step. A backward without one raises RuntimeError.
            False: only steps that call `weigh` are weighted, on all ranks or on none. Required under ``join()``, where
            a rank that has run out of inputs must know that the others send weights.
        precision: the dtypes in which gradients are sent, reduced and kept: :class:`torchddp.Precision`. None: their
            own.
        checks: what to watch for: :class:`torchddp.Checks`. None: ``Checks()``, with hang reports and warnings of
            traps. ``"off"``, or the environment variable TORCHDDP_CHECKS=0, which takes precedence: nothing.
        auto_refresh_trainable: in every forward that begins a synchronized step, check whether parameters were frozen,
            thawed, added or removed, and if so call :meth:`refresh_trainable`. Ranks compare results (an all-gather of
            one number per step), so a change on only some is an error. All ranks must run such forwards (those under
            ``no_grad`` don't count). Not inside ``join()``.

    Arguments that are not listed are as in torch: docs/reference/arguments.md has all, with their costs. Former names
    (``find_nonfinite``, ``main_grads``, ...) still work, with a FutureWarning (docs/migration.md).

    Memory per rank: the gradients, as buckets. Gradients of 16-bit parameters take 4 bytes per element with
    ``Precision(main_grads=)`` and 4 + 2 with ``Precision(reduce=)``. Over shared memory, autograd allocates gradients
    of 256 KiB and more there instead of copying them, with up to three spare blocks of each size.
    ``find_unused_parameters`` and ``static_graph`` add one int32 per parameter.

    Raises:
        TypeError: ``comm_hook`` or ``process_group`` has the wrong type.
        ValueError: mixed device types, or an invalid option.
        RuntimeError: no parameter requires grad, or the ranks' models differ (names the parameters and ranks).
    """

    _ddp_policy = ReducerPolicy()  # used by the session while it opens; subclasses replace it

    @accepts_former_names()
    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: BucketCap = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool | None = None,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, torch.nn.Parameter]] | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: _torch.MixedPrecision | None = None,
        device_mesh: dist.DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        transport: TransportChoice = "auto",
        comm_hook: hooks.HookChoice | None = None,
        timeout: Duration | None = None,
        sync: DDPSyncStrategy | SyncChoice | None = None,
        weighted: bool = False,
        precision: Precision | None = None,
        checks: ChecksChoice = None,
        auto_refresh_trainable: bool = False,
    ) -> None:
        given = locals()
        ranks = model.group_of(process_group, device_mesh) if init_sync else None
        # Until the ranks have agreed, an error on one reaches all. torch's constructor builds the reducer, so plain
        # attributes are set before it.
        with Agreement(self._ddp_policy.who, ranks, model.device_of(module)) as self._construction:
            model.check_module(module)
            options = DDPOptions({name: given[name] for name in OPTIONS})
            model.check_group(process_group, device_mesh)
            model.check_devices(module, device_ids, output_device)
            model.check_memory(module)
            if init_sync:
                model.check_values(module)
            self._coming_hooks = [] if comm_hook is None else [hooks.resolve(comm_hook)]
            inner = wrapper.wrapped_inside(module)
            self._options = options.kept()
            self._is_copy = False
            self.sync_strategy = options.strategy
            super().__init__(module, **options.for_torch(may_be_views=not inner))
            if self._delay_all_reduce_all_params:  # torch built no reducer, and would raise AttributeError in forward
                raise ValueError("delay_all_reduce_named_params contains every trained parameter: leave one out")
        del self._construction
        if inner:
            wrapper.copy_gradients([*inner, self])
        self._siblings = []
        wrapper.link_wrappers(self)
        for state, hook in self.__dict__.pop("_coming_hooks"):
            self.register_comm_hook(state, hook)

    # --- called by torch's constructor and by unpickling ---

    @contextlib.contextmanager
    def _names_as_torch_compares(self) -> Iterator[None]:
        """Inside, names of the outermost module's own parameters are ignored with torch's dot before them, too."""
        given = self.parameters_to_ignore
        self.parameters_to_ignore = given | {f".{name}" for name in given if "." not in name}
        try:
            yield
        finally:
            self.parameters_to_ignore = given

    def _build_params_for_reducer(self) -> tuple[list[torch.Tensor], list[bool]]:
        with self._names_as_torch_compares():
            found: tuple[list[torch.Tensor], list[bool]] = super()._build_params_for_reducer()
        return found

    def _build_debug_param_to_name_mapping(self, parameters: list[torch.Tensor]) -> dict[int, str]:
        with self._names_as_torch_compares():
            names: dict[int, str] = super()._build_debug_param_to_name_mapping(parameters)
        return names

    def _ddp_init_helper(
        self, parameters: list[torch.Tensor], sparse: list[bool], names: dict[int, str], static_graph: bool
    ) -> None:
        before: ReducerSession | None = self.__dict__.get("session")
        collective = before is not None or (self._options.init_sync and not self._is_copy)
        ordered = model.names_in_order(names)
        self.session = ReducerSession(
            self, self._options, self._ddp_policy, parameters, ordered, sparse, is_collective=collective, before=before
        )
        self.reducer = self.session.reducer
        self.logger = DDPLogger(self.reducer, self.process_group)
        self.logger.log_construction(self, self.session)
        self._passing_sync_batchnorm_handle(self.module)
        if before is not None:
            try:
                refresh.restore_modes(self, before)
            except BaseException:
                self.session.close()
                raise
        self.observers = Observers(self.session)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        del state["session"], state["observers"]
        # The reducer of a copy has no communication hook.
        state |= {"_is_copy": True, "_siblings": [], "_comm_hooks": [], "_builtin_hook": None}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._has_rebuilt_buckets = False  # the new reducer has no measured order

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in every module; with ``main_grads`` it also zeros each ``parameter.main_grad`` in place."""
        super().zero_grad(set_to_none)
        if "session" in self.__dict__:  # not if a subclass skips the constructor
            self.session.precision.zero()

    # --- weighted means, reducing without a backward, not reducing ---

    def weigh(self, weight: float | torch.Tensor, *, loss: LossKind = "mean") -> None:
        """Set the next backward's weight: gradients become ``sum(w * g) / sum(w)`` over a step's backwards and ranks.

        Example:

            model.weigh(len(batch))
            loss_of(model(batch)).backward()  # the mean over the batch
            optimizer.step()

        Call it on every rank before each backward of a step, including those under `no_sync`. ``g`` are the gradients
        of one backward, so a step of several microbatches needs no division of the loss. A rank without samples runs
        forward and backward on any batch with weight 0, which contributes nothing even if its gradients are NaN. Not
        collective; the sum of the weights is sent along with the first bucket. See ``docs/weighted_means.md``.

        Args:
            weight: the number of samples or tokens that the loss covers, at least 0: a number or a one-element tensor.
            loss: whether the loss is the ``"mean"`` or the ``"sum"`` over them. With "sum", they are only divided by
                the weights.

        Raises:
            TypeError, ValueError: the weight is invalid.
            RuntimeError: under ``join()`` without ``weighted=True``.
        """
        self._weigh(*weight_and_count(weight, loss, self.session.rank))

    def _weigh(self, weight: float, count: float, **part: bool) -> None:
        """What every way to weigh a backward calls; ``part``: see `ReducerSession.weigh`."""
        self.session.weigh(weight, count, **part)

    @torch.no_grad()
    def reduce(self) -> None:
        """Average the existing gradients over the ranks, in buckets, as a synchronized backward would. Collective.

        For gradients accumulated under `no_sync`; FORCED_SYNC of `torchddp.sync` calls this. Ranks may have used
        different parameters: a missing gradient counts as zero, unless no rank has one: then it stays None. With
        ``find_unused_parameters``, ``.grad`` also stays as it is if no rank has used the parameter since.

        Example:

            with model.no_sync():
                for batch in microbatches:
                    loss_of(model(batch)).backward()
            model.reduce()
            optimizer.step()

        Raises:
            RuntimeError: this mode of the model can only reduce in backward (the message says why).
            TransportError: a peer died or did not arrive in time.
        """
        self._check_can_reduce()
        self.session.reduces_now = True
        try:
            self._begin_step()
            self.session.reduce()
        finally:
            self.session.reduces_now = False

    def _check_can_reduce(self) -> None:
        """Raise RuntimeError with the reason if `reduce` can't work in this model's mode. Not collective."""
        reason = model.reason_against_reducing(self)
        if not reason and self.session.is_joining:
            reason = "under join(), ranks that have run out of inputs would not take part"
        if reason:
            raise RuntimeError(
                f"gradients can't be reduced after backward (reduce(), FORCED_SYNC) on rank {self.session.rank}: "
                f"{reason}. Use SINGLE_AUTO_SYNC or MULTI_AUTO_SYNC."
            )

    # --- freezing, thawing, adding and removing parameters ---

    def refresh_trainable(self) -> None:
        """Update what is reduced after parameters were frozen, thawed, added or removed. Collective.

        Call it between steps on all ranks, after making the same changes on each. Parameters keep their identity and
        the optimizer its state; gradients accumulated under `no_sync` are reduced in the next step. New parameters and
        buffers get rank 0's values on all ranks, as when a module is wrapped; existing ones are neither sent nor
        changed. Options, communication hooks and the step count carry over. Buckets are laid out as for a new model,
        ``static_graph`` records again, and ``bucket_cap_mb="auto"`` plans again. A hook with per-bucket state should
        have a method ``follow_parameters(model)``; torch's PowerSGD starts over. See docs/freeze_and_thaw.md.

        Raises:
            RuntimeError: the models differ between ranks (raised on every rank, with parameters and ranks); no
                parameter requires grad; a backward is incomplete; inside `join()`; a captured CUDA graph holds the
                buckets. Nothing has changed, and it can be called again after the cause is fixed.
            ValueError: the parameters are on several types of devices.
            TransportError: a peer died or did not arrive in time.
        """
        refresh.refresh_trainable(self)

    # --- communication hooks, join ---

    def _check_comm_hook(self, hook: Callable[..., Any]) -> None:
        try:
            hooks.check_hook_signature(hook)
        except (TypeError, ValueError) as error:
            self.logger.set_error_and_log(f"{type(error)}: {error}")
            raise
        is_bf16 = getattr(hook, "__name__", "") in ("bf16_compress_hook", "bf16_compress_wrapper_hook")
        if is_bf16 and self.device_type != "cpu":
            # torch requires CUDA and NCCL here, even on CPU, where gloo can sum bfloat16
            super()._check_comm_hook(hook)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce buckets with ``hook(state, bucket: GradBucket) -> Future[Tensor]`` from now on (torch's types).

        Call it once, before the first backward. The bucket is not divided by the world size beforehand. Any hook
        written for torch's class works. Every rank must register the same hook, which is compared in the next step;
        registering one of ``torchddp.comm_hooks`` is itself collective.

        Example:

            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

            model.register_comm_hook(None, bf16_compress_hook)
        """
        if self._comm_hooks or self._builtin_hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. This model already has a "
                "communication hook; comm_hook= registers one, too."
            )
        attached = hooks.attached(hook)
        with self.session.agreement() as agreement:
            self._check_comm_hook(hook)
            hooks.check_attached(hook, self)
            if attached is not None:  # which communicates now
                self.session.agree(agreement, (hook, state))
        with self.session.agreement():  # of the next step, in which the others get this rank's error
            if attached is not None:
                attached.attach(self)
        self._install_comm_hook(state, hook)
        self._comm_hooks.append((hook, state))
        self.session.expect_agreement()

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        self.reducer.register_builtin_comm_hook(comm_hook_type)
        self.logger._set_comm_hook_name(str(comm_hook_type))
        self._builtin_hook = comm_hook_type
        self.session.expect_agreement()

    def join_hook(self, **kwargs: object) -> JoinHook:
        """As in torch, for `join()`. RuntimeError with ``Checks(nonfinite="raise")``."""
        if self._options.checks.nonfinite == RAISE:
            raise RuntimeError(
                'Checks(nonfinite="raise") can\'t be used with join(): ranks that have run out of inputs would not '
                "raise. Use Checks(nonfinite=True)"
            )
        hook: JoinHook = super().join_hook(**kwargs)
        self.skip_all_reduce_unused_params = False  # also of later reducers
        self.reducer.skip_nothing()
        self.session.joining(hook)
        return hook

    def _sync_final_model(self, is_last_joiner: bool) -> None:
        super()._sync_final_model(is_last_joiner)
        self.session.joining(None)

    def _match_all_reduce_for_bwd_pass(self) -> None:
        self.session.agree_once()
        self.reducer.match_step()

    def _match_unused_params_allreduce(self) -> None:
        pass  # match_step() does it

    # --- process groups ---

    def update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Continue over another process group. Collective among its ranks, each of which has wrapped this model.

        Call it between steps, or after a failed step; in that case clear the gradients, which may be partly averaged.
        The ranks agree on buckets and connect shared memory again. Hooks of ``torchddp.comm_hooks`` move along with
        their state, ``static_graph`` records again, and ``bucket_cap_mb="auto"`` plans again. Parameters, buffers and
        optimizer state stay as they are on each rank: see :meth:`sync_module_states`. A rank outside the group may call
        this too; its model can't be trained until it gets a group that contains the rank.

        Raises:
            TypeError: not a process group.
            ValueError: the group has no backend for the model's device, or the ranks have different transports.
            RuntimeError: the group was destroyed; the models differ between its ranks (names the parameters and
                ranks); a communication hook can't move. The model keeps its previous group.
            TransportError: a rank of the group died or did not arrive in time.
        """
        refresh.update_process_group(self, new_process_group)

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """torch's name of :meth:`update_process_group`."""
        self.update_process_group(new_process_group)

    def sync_module_states(self, src: int = 0) -> None:
        """Copy one rank's parameters and buffers to all ranks. Collective.

        For ranks that joined through :meth:`update_process_group`. Ignored parameters and buffers are left alone.
        Works in place, so optimizers keep their parameters; optimizer state is not sent.

        Args:
            src: the sending rank in the model's process group; the same on all ranks.

        Raises:
            ValueError: ``src`` is not a rank of the group, or not the same on all ranks.
            RuntimeError: parameters or buffers differ between ranks (names them).
            TransportError: a peer died or did not arrive in time.
        """
        self.session.sync_states(src)

    def interrupt(self, reason: object) -> None:
        """Make this rank's current and later waits in this model raise TransportError(reason); an exception will do.

        Thread-safe; not collective. Peers see this rank as gone. It can continue only over another process group.
        """
        self.reducer.transport.interrupt(str(reason))

    def replan(self) -> None:
        """Measure the next eight synchronized steps and plan the buckets again, even if they were not planned before.

        Not collective itself, but every rank must call it before the same step, and the planning is collective. Until
        it is done, no rank may run a forward that the others don't, except without gradients. A model under ``join()``,
        with a communication hook, or with a step captured in a CUDA graph keeps its buckets.
        """
        self.observers.add("bucket_planning").start(look_for_kept=False)

    def gradient_stats(self) -> torch.Tensor:
        """Statistics of the averaged gradients of the last synchronized backward, without another pass over them.

        Returns:
            float64 tensor ``[buckets, 2]`` on the model's device: each bucket's sum of squares and its number of
            infinite or NaN values. Equal on all ranks. ``stats[:, 0].sum().sqrt()`` is the total 2-norm for clipping,
            and ``stats[:, 1].sum()`` is what a loss scaler needs; neither waits for the device. Sparse gradients count
            as zero. The next backward overwrites the tensor, unless the buckets change before it.

        Example:

            model = torchddp.DistributedDataParallel(module, checks=torchddp.Checks(gradient_stats=True))
            loss_of(model(batch)).backward()
            norm = model.gradient_stats()[:, 0].sum().sqrt()

        Raises:
            RuntimeError: the module was not made with ``Checks(gradient_stats=True)``.
        """
        return self.reducer.gradient_stats()

    def nonfinite(self) -> list[NonFinite]:
        """Where infinite and NaN gradients came from: each rank's own gradients before averaging, earliest steps first.

        Not collective. For each rank it covers the last run of consecutive steps with such gradients, with the first
        occurrence per parameter: the first entries are the source, and later ones may come from weights that it
        corrupted. Findings of other ranks arrive within half a second. Copies of a model report their own rank only.
        RuntimeError without ``Checks(nonfinite=True)``.

        Example:

            model = torchddp.DistributedDataParallel(module, checks=torchddp.Checks(nonfinite=True))
            loss_of(model(batch)).backward()
            for found in model.nonfinite():
                print(found)
        """
        finder = self.observers.get("find_nonfinite")
        if finder is None:
            raise RuntimeError("gradients are only checked by a DistributedDataParallel with Checks(nonfinite=True)")
        return list(finder.found())

    def traffic(self) -> dict[str, Traffic]:
        """Bytes sent for gradients in the last synchronized step: see :func:`torchddp.traffic.of_model`."""
        return of_model(self)

    def _check_manual_backward_finalization_supported(self, required: bool = True) -> None:  # called by torch 2.15
        if required:
            raise RuntimeError(
                "require_manual_backward_finalization is not supported: gradients are final after backward()"
            )

    if hasattr(Forward, "finalize_backward"):  # torch's setter calls a method of its reducer
        require_manual_backward_finalization = property(
            lambda self: False, _check_manual_backward_finalization_supported
        )

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """After the first ten steps, refresh ``_get_ddp_logging_data()`` every ``sample_rate``-th step."""
        if sample_rate < 1:
            what = "DDP runtime logging sample rate should be equal or greater than 1"
            self._log_and_throw(ValueError, f"{what}, got {sample_rate}")
        self.logger.sample_rate = sample_rate


# The names of all arguments but the module, in their order.
_SIGNATURE: Final = inspect.signature(DistributedDataParallel.__init__)
OPTIONS: Final = tuple(_SIGNATURE.parameters)[2:]


def options_of(**given: Any) -> DDPOptions:
    """These arguments, checked, and the defaults of the others. TypeError or ValueError: see `DDPOptions`."""
    bound = _SIGNATURE.bind_partial(**given)
    bound.apply_defaults()
    return DDPOptions({name: bound.arguments[name] for name in OPTIONS})
