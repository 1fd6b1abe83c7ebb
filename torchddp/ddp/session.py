"""One model's engine over one process group: its transport, its reducer, and what they were built from."""

from __future__ import annotations

import contextlib
import datetime
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp import _C, _torch
from torchddp.ddp import hooks, model
from torchddp.ddp.bucket_sizes import default_sizes
from torchddp.ddp.checks import RAISE
from torchddp.ddp.options import DDPOptions
from torchddp.ddp.same_model import ModelDescription, agree_on_model, describe
from torchddp.ddp.states import broadcast_over, send_states
from torchddp.errors import TransportError
from torchddp.transport import select
from torchddp.transport.agreement import Agreement, TransportExchange, group_timeout


class SessionOwner(TorchDDP):
    """What a session uses of the wrapper that it belongs to."""

    _options: DDPOptions
    _is_copy: bool
    _shares_gradients = False  # whether another wrapper's reducer gets the gradients of the same parameters


class ReducerPolicy:
    """How a model's gradients are reduced. In this base class every rank gets the average of every parameter.

    Other kinds of data parallelism derive from it and pass it to the session, which calls it while it opens.

    Attributes:
        who: the class or function, for errors of ranks that differ.
        ranks_agree: whether the ranks compare options, models and hooks; not where ranks come and go.
        reduce_dtype: dtype in which float32 gradients of buckets with an owner are sent; None: no conversion.
        sends_states: whether all ranks get rank 0's parameters when the first session opens.
        ranks_compare_changes: with ``auto_refresh_trainable``, whether ranks tell each other before each step if
            parameters have changed. Otherwise each rank checks only its own, and all must change in the same way.
    """

    who = "DistributedDataParallel"
    ranks_agree = True
    reduce_dtype: torch.dtype | None = None
    sends_states = True
    ranks_compare_changes = True

    def compared(self) -> dict[str, str]:
        """Options besides `DDPOptions` that must be equal on all ranks, in words."""
        return {}

    def parameters(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that the reducer gets instead of the model's parameters, one for each."""
        return parameters

    def transport(self, session: ReducerSession, before: ReducerSession | None) -> _C.Transport:
        """Return the transport, with all ranks' states synchronized if they may communicate now (then collective)."""
        if before is not None and before.device.type == session.device.type:
            return before.reducer.transport
        transport, ddp = session.connect(collective=session.is_collective), session.ddp
        if not session.is_collective or not self.sends_states:
            return transport
        named = model.states_of(ddp.module, ddp.parameters_to_ignore, buffers=session.options.sends_buffers_at_init)
        return send_states(ddp, transport, [*named.values()], 0, session.wait_limit)

    def owners(self, parameters: Sequence[torch.Tensor]) -> list[int] | None:
        """The only rank that gets each parameter's average; None: all ranks get all of them."""
        return None

    def bucket_caps(self, session: ReducerSession, transport: _C.Transport) -> tuple[list[int], int]:
        """The caps the user asked for, or those of `default_sizes` (then collective if that is)."""
        if asked_for := session.options.asked_caps:
            return asked_for, 0
        return default_sizes(
            session.parameters, transport, session.process_group, session.wait_limit, session.first_bucket_bytes
        )

    def opened(self, session: ReducerSession) -> None:
        """The reducer exists. Its transport may have changed, if some rank had no room in shared memory."""

    def closing(self, session: ReducerSession) -> None:
        """The session ends: remove everything that it put on the module."""


class ReducerSession:
    """Opened by the constructor, by unpickling, and again when the model's parameters or their owners change.

    Attributes:
        parameters: those whose gradients are reduced. `reduced_ids` also has those that the policy replaced.
        is_collective: whether it was opened over this group, by ranks that could communicate (not ``init_sync=False``).
        is_copy: the model was pickled or copied, perhaps by this rank alone, so its setup does not communicate.
        reduces_now: the step has no backward (`DistributedDataParallel.reduce`).
        first_bucket_bytes: rank 0's cap of the first bucket, where the transport has no other.
        waited_ns, waited_before_ns: how long forwards have waited for other ranks, in all: in and before their steps.

    Args:
        ddp: held weakly; torch's constructor has run up to the reducer.
        sparse: which parameters have sparse gradients.
        before: the model's previous session, already closed; opening is then collective.
    """

    def __init__(
        self,
        ddp: SessionOwner,
        options: DDPOptions,
        policy: ReducerPolicy,
        parameters: list[torch.Tensor],
        names: list[str],
        sparse: list[bool],
        *,
        is_collective: bool,
        before: ReducerSession | None = None,
    ) -> None:
        model.check_is_group(ddp.process_group)
        self.options, self.is_collective, self.is_copy = options, is_collective, ddp._is_copy
        self.policy = policy
        self._ddp = weakref.ref(ddp)
        self.is_open = True
        self._join_hook: weakref.ref[object] | None = None
        self._weighed_in: int = -1 if before is None else before._weighed_in  # steps finished at the last weigh()
        self._take_group(ddp.process_group)
        model.warn_if_alone(ddp.process_group)
        self.parameters = policy.parameters(parameters)
        self.device = self.parameters[0].device
        self.reduced_ids = {id(p) for p in (*parameters, *self.parameters)}
        self._names = names
        model.check_local(self.parameters, names)
        self.precision = options.precision.mode()
        self.precision.check(ddp, self.parameters, names, sparse)
        self.reduces_now = False
        self.waited_ns = self.waited_before_ns = 0
        _ = self.stall_limit_s  # an invalid value raises before anything is sent
        self.first_bucket_bytes = _torch.FIRST_BUCKET_BYTES
        self._model = self._describe_model(ddp)
        self._has_buffers = bool(ddp.named_module_buffers)
        self._has_agreed = False
        self._shares_transport: bool = before is not None and (before._has_agreed or before._shares_transport)
        self._choice: str = select.C10D if before is None else before._choice
        self._all_in_place: bool = before is None or before._all_in_place  # over NCCL, all ranks or none
        transport = policy.transport(self, before)
        self._buffer_broadcast = broadcast_over(ddp, transport, self.wait_limit)
        if transport.size > 1 and ddp.modules_buffers and _C.can_travel_as_bytes(ddp.modules_buffers):
            self._buffer_broadcast.reserve(ddp.modules_buffers)  # before ranks agree on memory
        dtypes = self._bucket_dtypes()
        self.specs = model.param_specs(self.parameters, names, sparse, dtypes, policy.owners(parameters))
        self.bucket_caps_bytes, solo_bytes = policy.bucket_caps(self, transport)
        self.precision.prepare(self.parameters)
        shares = bool(options.gradient_as_bucket_view) or self.precision.shares_storage
        config = _C.ReducerConfig(
            caps_bytes=self.bucket_caps_bytes,
            solo_bytes=solo_bytes,
            find_unused_parameters=ddp.find_unused_parameters,
            gradient_as_bucket_view=ddp.gradient_as_bucket_view,
            view_storage=_C.ViewStorage.BUCKET if shares else _C.ViewStorage.OWN,
            skip_all_reduce_unused_params=ddp.skip_all_reduce_unused_params,
            compiled_autograd_takes_over=ddp._use_python_reducer,
            wire_dtype=options.precision.wire,
            reduce_dtype=policy.reduce_dtype,
            grad_precision=self.precision.kind,
            gradient_stats=options.checks.gradient_stats,
            find_nonfinite=bool(options.checks.nonfinite),
            raise_nonfinite=options.checks.nonfinite == RAISE,
            weighted=options.weighted,
            zero_weights_raise=options.checks.zero_weights == RAISE,
            in_place_bytes=self.options.in_place_bytes if self._all_in_place and not ddp._shares_gradients else 0,
            timeout=self.wait_limit,
        )
        # One rank may have no memory for its buckets. Over shared memory, that rank leaves, and the others raise there.
        shm = transport if isinstance(transport, _C.ShmTransport) else None
        ranks = self.process_group if is_collective and policy.ranks_agree and shm is None else None
        with Agreement(policy.who, ranks, self.device) as has_room:
            try:
                self.reducer = _C.Reducer(self.parameters, self.specs, self.process_group, transport, config)
            except Exception:
                if shm is not None:
                    shm.leave(f"rank {shm.rank} could not make its buckets")
                raise
            has_room.verify()
        self._shares_transport |= is_collective
        self.precision.opened(self.reducer, self.parameters)
        if ddp._shares_gradients:
            self.reducer.share_gradients()
        if ddp.mixed_precision is not None:
            for index, parameter in enumerate(parameters):
                parameter._idx = index  # type: ignore[attr-defined]  # torch's mixed-precision hooks pass it back
        # torch's mixed precision replaces the parameters with other tensors in every step.
        watched = parameters if ddp.mixed_precision is None else []
        self._watch = model.ParameterWatch(ddp.module, watched, names[: len(watched)], warns=options.checks.traps)
        self._known: list[torch.Tensor] = list(ddp.module.parameters())
        self._trained = bytes(parameter.requires_grad for parameter in self._known)
        self._hook_tables = model.backward_hook_tables(ddp)
        self.buffer_names = {name for name, _ in ddp.module.named_buffers()}
        if self.reducer.transport is not transport:
            self._buffer_broadcast = broadcast_over(ddp, self.reducer.transport, self.wait_limit)
        self.expect_agreement()
        policy.opened(self)

    @property
    def wait_limit(self) -> datetime.timedelta:
        """The limit of each reduction; zero: the process group's own."""
        return self.options.wait_limit

    @property
    def stall_limit_s(self) -> float:
        """Seconds of waiting after which ranks report why; 0: never. ValueError: see `Checks.stall_limit_s`."""
        limit = self.wait_limit or group_timeout(self.process_group, self.device.type)
        return self.options.checks.stall_limit_s(limit.total_seconds())

    @property
    def ddp(self) -> SessionOwner:
        """The model. Not called once that is destroyed."""
        return self._ddp()  # type: ignore[return-value]

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """The module's current parameters, including frozen but not ignored ones; of a DTensor, this rank's part."""
        ddp = self.ddp
        ignored = ddp.parameters_to_ignore
        return [(name, model.local_of(p)) for name, p in ddp.module.named_parameters() if name not in ignored]

    @property
    def synchronizes(self) -> bool:
        return bool(self.ddp.require_backward_grad_sync)

    @property
    def joins(self) -> bool:
        """Whether the model is or was used under `join()`, so that ranks may do different numbers of steps."""
        return bool(self.ddp._join_config.enable)

    @property
    def is_captured(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @property
    def has_backward_hooks(self) -> bool:
        return any(self._hook_tables)

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward was synchronized whose backward has not begun."""
        if not (self.is_open and self.reducer.awaits_backward):
            return False
        try:
            self.reducer.check_not_unfinished()
        except RuntimeError:  # its backward failed halfway
            return False
        return True

    @property
    def has_owners(self) -> bool:
        return any(spec.owner >= 0 for spec in self.specs)

    @property
    def is_joining(self) -> bool:
        return self.joins and self._join_hook is not None and self._join_hook() is not None

    @property
    def is_weighing(self) -> bool:
        """Whether the step that has not been reduced yet is weighted."""
        return self._weighed_in == self.reducer.finished_steps

    @_torch.disable_dynamo(recursive=True)
    def has_changed(self) -> bool:
        """Whether parameters were frozen, thawed, added or removed on this rank since it opened. Not collective."""
        module = self.ddp.module
        return not (model.trains_as_before(module, self._known, self._trained) or model.in_functional_call())

    @property
    def has_comm_hook(self) -> bool:
        return bool(self.ddp._comm_hooks)

    def connect(self, *, collective: bool, group: dist.ProcessGroup | None = None) -> _C.Transport:
        """Open the transport for a group (None: this session's). If ``collective``, models are compared first."""
        group = group or self.process_group
        devices = [p.device for p in self.parameters]
        choice = select.intended_transport(self.options.transport, group, devices, collective=collective)
        if not collective and self.is_copy:
            choice = select.C10D
        self._choice = choice
        if collective:
            self._agree_on_options(group)
        return select.open_transport(choice, group, device=self.device, timeout=self.wait_limit or None)

    def _agree_on_options(self, group: dist.ProcessGroup) -> None:
        """Compare everything, and take rank 0's values of options that it decides. Collective."""
        own = {**self.options.of_rank_0(), "first_bucket_bytes": self.first_bucket_bytes}
        agreement = self.agreement(group)
        by_rank = agree_on_model(agreement, self._model, self._compared(), (own, self.options.in_place_bytes > 0))
        if by_rank is None:
            return
        taken = dict(by_rank[0][0])
        self.first_bucket_bytes = taken.pop("first_bucket_bytes")
        self._all_in_place = all(in_place for _, in_place in by_rank)
        self.options = self.ddp._options = self.options.but(**taken)

    def agreement(self, group: dist.ProcessGroup | None = None) -> Agreement:
        """Errors in its context reach all ranks. In the constructor, that one has begun already."""
        begun: Agreement | None = self.ddp.__dict__.get("_construction")
        if begun is not None and not begun.is_over:
            return begun
        ranks = (group or self.process_group) if self.policy.ranks_agree else None
        return Agreement(self.policy.who, ranks, self.device, self.digests(group))

    def digests(self, group: dist.ProcessGroup | None = None) -> TransportExchange | None:
        """An exchange over the transport, if all ranks are known to have the same and it isn't the process group."""
        known = self._has_agreed or self._shares_transport
        if group is not None or not known or self.reducer.transport.name == select.C10D:
            return None
        return self.exchange(int)

    def exchange(self, kind: type[int] | type[float]) -> TransportExchange:
        """For lists of numbers, over the transport."""
        return TransportExchange(self.reducer.transport, kind, self.device, self.wait_limit, self._compares)

    @contextlib.contextmanager
    def _compares(self) -> Iterator[None]:
        """For hang reports: the transport's waits are in no call of torch.distributed."""
        wait = self.reducer.begin_wait("the other ranks, to compare what they have")
        try:
            yield
        finally:
            self.reducer.end_wait(wait)

    def expect_agreement(self) -> None:
        """Make ranks compare everything, hooks included, before they send anything for the next step."""
        self._has_agreed = not self.policy.ranks_agree or self.process_group.size() == 1
        if self._has_agreed:
            return
        me = weakref.ref(self)

        def agree_once() -> None:
            if (session := me()) is not None:
                session.agree_once()

        self.reducer.before_next_step(agree_once)

    @_torch.disable_dynamo(recursive=True)
    def agree_once(self) -> None:
        """Compare the ranks if they are expected to. Collective. Raises what `agree_on_model` does."""
        if self._has_agreed or self.is_captured or _torch.in_functorch():
            return
        self.agree(self.agreement())
        self._has_agreed = True

    def agree(self, agreement: Agreement, *coming: tuple[object, object]) -> None:
        """Compare everything with the other ranks. Collective. ``coming``: hooks that are about to be registered."""
        of_rank_0 = {name: str(value) for name, value in self.options.of_rank_0().items()}
        agree_on_model(agreement, self._model, {**self._compared(*coming), **of_rank_0}, None)

    def _compared(self, *coming: tuple[object, object]) -> dict[str, str]:
        ddp = self.ddp
        compared = self.options.compared(has_buffers=self._has_buffers)
        compared["transport (or TORCHDDP_TRANSPORT)"] = self._choice
        compared["static_graph"] = str(self.options.static_graph or ddp.static_graph)
        compared["comm_hook"] = hooks.describe_all(ddp, *coming)
        return {**compared, **self.policy.compared()}

    def _describe_model(self, ddp: TorchDDP) -> ModelDescription:
        options, ignored = self.options, ddp.parameters_to_ignore
        copied = options.init_sync and self.policy.sends_states
        named = ddp.module.named_parameters() if copied else ()
        frozen = {n: model.local_of(p) for n, p in named if not p.requires_grad and n not in ignored}
        sends_buffers = options.sends_buffers_in_forward or (copied and options.sends_buffers_at_init)
        buffers = ddp.named_module_buffers if sends_buffers else {}
        members = {name for name, _ in (*ddp.module.named_parameters(), *ddp.module.named_buffers())}
        return ModelDescription(
            describe(self.parameters, self._names, self._bucket_dtypes()),
            describe(list(frozen.values()), list(frozen)),
            describe(list(buffers.values()), list(buffers)),
            sorted(members.intersection(ignored)),
        )

    def _bucket_dtypes(self) -> list[torch.dtype]:
        return [self.precision.bucket_dtype(p) for p in self.parameters]

    def begin_step(self) -> None:
        """Called before a forward with gradients. Collective when the reducer rebuilds its buckets."""
        ddp = self.ddp
        if not self.is_open:
            raise RuntimeError(
                f"This DistributedDataParallel (rank {self.rank}) no longer reduces gradients: it was unwrapped, or "
                "refresh_trainable() failed halfway. Call that again on all ranks, or wrap the module again."
            )
        if not self.is_in_group and ddp.require_backward_grad_sync:
            raise RuntimeError(
                f"This DistributedDataParallel (rank {self.rank} of its old process group) was given a process "
                "group that this rank is not in, so it has no ranks to reduce gradients with. Pass a group with this "
                "rank to update_process_group(), or train under no_sync()."
            )
        self.precision.before_forward()
        if ddp.require_backward_grad_sync:
            self._watch.begin_step(without_gradients=self.reducer.prepare_for_forward())
        else:
            self._check_stays_local(self.is_weighing)
        if self._watch.in_doubt:
            self._watch.look(ddp, self.reduced_ids)

    def weigh(self, weight: float, count: float, *, begins: bool = True, ends: bool = True) -> None:
        """Multiply the next backward's gradients by ``weight``, and add ``count`` to the divisor of all ranks' sum.

        Not collective. ``begins``, ``ends``: of a step that is reduced several times, whether this is for its first and
        its last reduction. RuntimeError: under ``join()`` without ``weighted=True``.
        """
        if self.is_joining and not self.options.weighted:
            raise RuntimeError(
                f"weigh() on rank {self.rank}: under join() the model must be made with weighted=True, so that a rank "
                "that has run out of inputs knows that the others send weights"
            )
        self.precision.before_forward()  # main gradients that were set to None are dropped, and their weights with them
        self._check_stays_local(weighted=True)
        self.reducer.weigh(weight, count, begins, ends)
        self._weighed_in = self.reducer.finished_steps

    def _check_stays_local(self, weighted: bool) -> None:
        """RuntimeError if a weighted backward under ``no_sync()`` would be reduced: its step would have two means."""
        if weighted and not self.synchronizes and self.awaits_backward:
            raise RuntimeError(
                f"rank {self.rank}: a forward outside no_sync() has had no backward, so the next weighted backward "
                "would be reduced, although it is under no_sync(). Put forward and backward on the same side of "
                "no_sync(), and a forward without a backward under torch.no_grad() or no_sync(). To go on, take a step "
                "without no_sync()"
            )

    def sync_states(self, src: int) -> None:
        """Copy one rank's parameters and buffers to all, once the ranks agree on which and what. Collective."""
        with self.agreement() as agreement:
            if not 0 <= src < self.process_group.size():
                last = self.process_group.size() - 1
                raise ValueError(f"src must be a rank of the model's process group, 0 to {last}, got {src}")
            named = model.states_of(self.ddp.module, self.ddp.parameters_to_ignore, buffers=True)
            described = ModelDescription(describe([*named.values()], [*named]))
            agree_on_model(agreement, described, {"src": str(src)}, None)
        send_states(self.ddp, self.reducer.transport, [*named.values()], src, self.wait_limit)

    def sync_buffers(self, buffers: list[torch.Tensor], root: int) -> None:
        """Send one rank's buffers to all, as bytes. Collective."""
        wait = self.reducer.begin_wait("the broadcast of buffers")
        try:
            self._buffer_broadcast.run(buffers, root)
        except TransportError as error:
            text = (
                f"{error}\nrank {self.rank}: the broadcast of {len(buffers)} buffers "
                f"({sum(b.nbytes for b in buffers)} bytes) from rank {root} failed."
            )
            raise TransportError(self.reducer.with_failure_note(text)) from error
        finally:
            self.reducer.end_wait(wait)

    def reduce(self) -> None:
        """Average the existing gradients without a backward. Collective."""
        self.agree_once()
        without = self._without_gradient()
        try:
            self.reducer.reduce_now()
        finally:  # it raises after a step without any weight
            for parameter in without:
                parameter.grad = None

    def _without_gradient(self) -> list[torch.Tensor]:
        """The parameters of which no rank has a gradient. Collective."""
        there = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.int32, device=self.device)
        transport = self.reducer.transport
        if transport.size > 1 and not self.is_captured:
            with self._compares():
                work = transport.make_work()
                transport.all_reduce(there, work)
                work.wait(self.wait_limit)
        return [p for p, count in zip(self.parameters, there.tolist(), strict=True) if not count]

    def rebind(self, new_group: dist.ProcessGroup) -> None:
        """Continue over another process group with a new transport. Collective among its ranks.

        ValueError or RuntimeError if the ranks have different transports or models; the session keeps its group.
        """
        transport = self.connect(collective=True, group=new_group)
        self.reducer.reset_state()
        self._take_group(new_group)
        self.is_collective = False  # some ranks may be new here, and were opened alone
        self.reducer.update_process_group(new_group, transport)
        if not self.reducer.is_in_graph:
            # Use rank 0's buckets: a rank that joins has not measured the order that the others use.
            self.reducer.adopt_plan(None)
            self.reducer.reset_state()
        self._buffer_broadcast = broadcast_over(self.ddp, self.reducer.transport, self.wait_limit)
        self.expect_agreement()
        if not self.is_joining:  # as on a rank that is new, and takes no part in what forwards send under join()
            self.ddp._join_config = _torch.JoinConfig.construct_disabled_join_config()

    def _take_group(self, group: dist.ProcessGroup) -> None:
        self.process_group, self.rank, self.is_in_group = group, group.rank(), True

    def joining(self, hook: object | None) -> None:
        """A `join()` context with this hook begins; None: it has ended on all ranks."""
        self._join_hook = None if hook is None else weakref.ref(hook)

    def close(self) -> None:
        """Not collective. Steps raise from now on; another session may take over."""
        if self.is_open:
            self.is_open = False
            self.policy.closing(self)
            self.reducer.close()
