"""The base of all torchddp communication hooks."""

# No `from __future__ import annotations`: torch's register_comm_hook() compares a hook's annotations with types.

import abc
import weakref
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp.comm_hooks.exchange import Exchange, Hierarchical
from torchddp.comm_hooks.layout import Layout, Piece, layout_of
from torchddp.durations import Duration, timedelta_of
from torchddp.traffic import Traffic
from torchddp.transport.worker import Worker

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALLOWED = "float32, bfloat16 or float16"
Parameters = dict[str, nn.Parameter]  # by name
_GRACE_S = 5.0  # beyond the limit of a collective, for its thread to end


@dataclass
class _Step:
    number: int
    payload_bytes: int = 0
    wire_bytes: int = 0
    last_bucket: int = -1
    finished: int = -1  # steps of the model before this one


@dataclass
class _Attachment:
    model: weakref.ReferenceType[TorchDDP]
    process_group: dist.ProcessGroup
    names: dict[int, str]
    worker: Worker
    layouts: dict[tuple[int, ...], Layout] = field(default_factory=dict)


class HookOptions(TypedDict, total=False):
    """Arguments of every hook: see :class:`CommHook`."""

    hierarchical: Hierarchical
    timeout: Duration | None


class CommHook(abc.ABC):
    """Reduces gradients in its own way; for ``DistributedDataParallel(comm_hook=...)`` or ``register_comm_hook``.

    Every bucket becomes the average over all ranks, or the method's approximation of it: the same bits on every rank
    (of machines with equal CPUs or GPUs, if the method computes after the exchange). The hook's own thread, or a stream
    of a device, does the work while backward runs: Note [One thread per hook]. With one rank, gradients are unchanged.

    Example:

        model = torchddp.DistributedDataParallel(module, comm_hook=torchddp.comm_hooks.Int8())
        loss_of(model(batch)).backward()
        print(model.traffic()["hook"])

    A hook belongs to one model, over the model's process group. Gradients may be fp32, bf16 or fp16; sums are in fp32.
    A NaN or Inf in a gradient reaches the average on all ranks, and does not affect the next finite step. Under
    ``no_sync()`` nothing happens. A copy (pickle, deepcopy) belongs to no model yet.

    Args:
        hierarchical: "auto": if there are several hosts with equally many ranks, sum exactly within each host and
            compress only between hosts; False: every rank sends to every other; True: also with a single host.
        timeout: seconds or a timedelta that each of the hook's collectives may take; None: the process group's timeout.
    """

    # Whether it only sends exact sums, so that it works where nothing else is available (torchft's Manager).
    sends_sums_only = False
    _exchange: Exchange  # once attached

    def __init__(self, *, hierarchical: Hierarchical = "auto", timeout: Duration | None = None) -> None:
        self.hierarchical = hierarchical
        self.timeout = timedelta_of(timeout, "timeout")
        self._attachment: _Attachment | None = None
        self._shapes: dict[str, torch.Size] = {}
        self._step = _Step(0)

    # --- implemented by each method ---

    def _setup(self, exchange: Exchange, parameters: Parameters, module: nn.Module) -> None:
        """Collective, in :meth:`attach` and, with another exchange, :meth:`rebind`: check and keep the parameters.

        ``module``: the model without its wrapper.
        """
        self._exchange = exchange
        self._shapes = {name: p.shape for name, p in parameters.items()}
        self._device = next((p.device for p in parameters.values()), None)

    def _check(self, parameters: Parameters, module: nn.Module) -> None:  # noqa: B027  # most methods support all
        """Raise ValueError for parameters that the method does not support. Not collective; changes nothing."""

    def _follow(self, lead: int) -> None:  # noqa: B027  # most hooks have no shared state
        """Collective. After :meth:`_setup` with other ranks: synchronize what must agree, from rank ``lead``."""

    @abc.abstractmethod
    def _reduce(self, piece: Piece) -> None:
        """In place: the averages. Called in the same order on all ranks; padding may end up with any values."""

    def carried_state(self) -> dict[str, Any]:
        """What a rank that replaces another one should start with: the state that is equal on all ranks."""
        return {}

    def start_over(self, state: Mapping[str, Any] | None = None) -> None:
        """Drop this rank's own residuals, and start from another rank's :meth:`carried_state`. Not collective.

        For a rank that replaces another one, and (None) after a step that was discarded with everything sent in it.
        """
        raise RuntimeError(f"{type(self).__name__} can't start over without the other ranks")

    @abc.abstractmethod
    def _state(self) -> dict[str, Any]:
        """What must survive a checkpoint."""

    @abc.abstractmethod
    def _load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of `_state`; tensors of all parameters, by name."""

    # --- for use by methods ---

    def _average_exactly(self, flat: Tensor) -> None:
        self._exchange.sum_(flat.mul_(1 / self._exchange.world_size))

    def _named_state(self) -> dict[str, Any]:
        return {"hook": type(self).__name__, **self._state()}

    # --- lifetime ---

    def attach(self, model: TorchDDP) -> None:
        """Create the hook's process groups. Collective; called by the model when the hook is registered.

        Args:
            model: a DistributedDataParallel, torchddp's or torch's own. torch's does not call this, and needs
                ``model.register_comm_hook(None, hook.__call__)``.

        Raises:
            TypeError: a parameter that is neither fp32, bf16 nor fp16, by name.
            RuntimeError: an embedding with sparse gradients, by name; a hook that belongs to another model; a process
                group that torch does not know, together with ``find_unused_parameters``.
        """
        self.check(model)
        if self._attachment is not None:
            return
        parameters = _reduced_parameters(model)
        self._connect(model, parameters)
        names = {id(p): name for name, p in parameters.items()}
        worker = Worker(f"torchddp {type(self).__name__}")
        self._attachment = _Attachment(weakref.ref(model), model.process_group, names, worker)

    def check(self, model: TorchDDP) -> None:
        """Raise what :meth:`attach` would raise for this rank's model. Not collective."""
        if self._attachment is not None and self._attachment.model() is not model:
            raise RuntimeError(f"this {type(self).__name__} hook belongs to another model: make one for each")
        parameters = _reduced_parameters(model)
        _check_parameters(parameters, model)
        self._check(parameters, model.module)

    def _connect(self, model: TorchDDP, parameters: Parameters) -> None:
        if (opens := getattr(model.process_group, "open_exchange", None)) is not None:  # its own kind of exchange
            exchange = opens(self)
        else:
            device = next(iter(parameters.values())).device
            exchange = Exchange(model.process_group, device, self.hierarchical, self.timeout)
        if exchange.is_shared and (model.find_unused_parameters or getattr(model, "static_graph", False)):
            raise RuntimeError(
                f"{type(self).__name__} would share its process group with the search for unused parameters, and torch "
                "can't create another of these ranks: use find_unused_parameters=False and static_graph=False"
            )
        self._setup(exchange, parameters, model.module)

    def rebind(self, model: TorchDDP) -> None:
        """Continue over the process group that the model has now. Collective among its ranks.

        torchddp's ``update_process_group()`` calls it; after torch's, call it yourself. Residuals are sent with the
        next steps; new ranks start with zeros, and the residuals of ranks that are gone are lost. The step count
        continues from the largest on any rank. The old process groups exist until ``destroy_process_group()``.

        Raises:
            RuntimeError: not attached to this model, or an earlier reduction is still running.
        """
        attachment = self._attached_to(model)
        # Each earlier collective ends within its limit, and none begins after one that failed.
        limit_s = (self._exchange.time_limit or dist.default_pg_timeout).total_seconds()
        if not attachment.worker.finish(limit_s + _GRACE_S):
            who = f"{type(self).__name__} on rank {self._exchange.rank}"
            raise RuntimeError(f"{who} still waits for ranks of its old process group after {limit_s:.0f} s")
        self._connect(model, _reduced_parameters(model))
        # Ranks may have finished different numbers of steps before an error, and new ranks have done none.
        steps = self._exchange.each_ranks(self._step.number, self._device)
        self._step = _Step(int(max(steps)))
        self._follow(steps.index(max(steps)))
        attachment.process_group = model.process_group
        attachment.worker = Worker(f"torchddp {type(self).__name__}")

    def follow_parameters(self, model: TorchDDP) -> None:
        """Continue with the parameters that are trainable now. Collective. Called by the model's ``refresh_trainable``.

        A parameter's residual is kept if name and shape are still the same.

        Raises:
            RuntimeError: not attached to this model; an embedding with sparse gradients.
            TypeError: a parameter that is neither fp32, bf16 nor fp16, by name.
            ValueError: a parameter that the method does not support.
        """
        attachment = self._attached_to(model)
        self.check(model)
        parameters = _reduced_parameters(model)
        state, shapes = self._state(), self._shapes
        kept = {n for n, p in parameters.items() if attachment.names.get(id(p)) == n and shapes.get(n) == p.shape}
        self._setup(self._exchange, parameters, model.module)
        self._load_state(_without(state, shapes.keys() - kept))
        attachment.names = {id(p): name for name, p in parameters.items()}
        attachment.layouts.clear()

    def _attached_to(self, model: TorchDDP) -> _Attachment:
        attachment = self._attachment
        owner = None if attachment is None else attachment.model()
        if attachment is None or owner is None or model is not owner:
            raise RuntimeError(f"this {type(self).__name__} hook is not attached to this model")
        return attachment

    def close(self) -> None:
        """End the hook's thread. It restarts if another bucket arrives."""
        if self._attachment is not None:
            self._attachment.worker.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_exchange"} | {"_attachment": None}

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """torch's signature; ``state`` is unused. The future holds the bucket's buffer with the averages."""
        attachment = self._attachment
        if attachment is None:
            raise RuntimeError(f"{type(self).__name__} was not attached: call hook.attach(model) on all ranks first")
        exchange = self._exchange
        who = f"{type(self).__name__} on rank {exchange.rank}"
        model = attachment.model()
        if model is not None and model.process_group is not attachment.process_group:
            raise RuntimeError(f"{who} has the model's old process group: call hook.rebind(model) on all its ranks")
        flat = bucket.buffer()
        layout = self._layout(attachment, bucket, flat, who)
        step = self._count(exchange, bucket, flat, getattr(getattr(model, "reducer", None), "finished_steps", 0))
        if exchange.is_alone:
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(flat)
            return done
        label = f"{who}, step {step.number}, bucket {bucket.index()} ({layout.names()})"
        return attachment.worker.submit(lambda: self._run(exchange, flat, layout, step), label, flat.device)

    def _layout(self, attachment: _Attachment, bucket: dist.GradBucket, flat: Tensor, who: str) -> Layout:
        if flat.is_sparse or flat.dtype not in _DTYPES:
            what = "sparse" if flat.is_sparse else str(flat.dtype)
            name = next((attachment.names.get(id(p), "?") for p in bucket.parameters()), "?")
            kind = RuntimeError if flat.is_sparse else TypeError
            raise kind(f"{who}: bucket {bucket.index()} (with {name}) has {what} gradients, not dense {_ALLOWED}")
        key = (flat.numel(), *map(id, bucket.parameters()))
        if key not in attachment.layouts:
            attachment.layouts[key] = layout_of(bucket, attachment.names)
        return attachment.layouts[key]

    def _count(self, exchange: Exchange, bucket: dist.GradBucket, flat: Tensor, finished: int) -> _Step:
        # A step whose first buckets are skipped begins with a later one than the last of the step before.
        if bucket.index() <= self._step.last_bucket or finished != self._step.finished:
            self._step = _Step(exchange.step_after(self._step.number), finished=finished)
        self._step.last_bucket = bucket.index()
        self._step.payload_bytes += flat.nbytes
        return self._step

    def _run(self, exchange: Exchange, flat: Tensor, layout: Layout, step: _Step) -> Tensor:
        before = exchange.sent_bytes
        values = flat.to(torch.float32)  # no copy if it is fp32 already
        self._reduce(Piece(layout, values, step.number))
        layout.clear_gaps(values)
        if values is not flat:
            flat.copy_(values)
        step.wire_bytes += exchange.sent_bytes - before
        return flat

    @property
    def traffic(self) -> Traffic:
        """Bytes of the last synchronized step, once its backward is done."""
        return Traffic(self._step.payload_bytes, self._step.wire_bytes)

    def state_dict(self) -> dict[str, Any]:
        """The state that the hook keeps between steps; different on each rank. Tensors are stored by parameter name.

        Error feedback differs between ranks, so every rank must save its own; it is in units of gradient / world_size.
        """
        return {"step": self._step.number, **self._named_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`, once attached. The model may have other buckets. Each rank loads its own.

        Raises:
            ValueError: the state of another kind of hook, or of other parameters, by name.
            RuntimeError: not attached to a model yet.
        """
        if self._attachment is None:
            raise RuntimeError(f"attach {type(self).__name__} to a model before loading its state")
        if state.get("hook") != type(self).__name__:
            raise ValueError(f"this is the state of a {state.get('hook')!r} hook, not of {type(self).__name__!r}")
        self._step = _Step(int(state["step"]))
        self._load_state(state)


def _without(state: Any, names: Set[str]) -> Any:
    if isinstance(state, Mapping):
        kept = {key: value for key, value in state.items() if not (isinstance(value, Tensor) and key in names)}
        return {key: _without(value, names) for key, value in kept.items()}
    return [_without(value, names) for value in state] if isinstance(state, list) else state


def _reduced_parameters(model: TorchDDP) -> Parameters:
    ignored = {name.removeprefix(".") for name in model.parameters_to_ignore}
    leaves = getattr(model, "_leaves", {})  # replace DTensor parameters in buckets
    named = model.module.named_parameters()
    return {n: leaves.get(id(p), p) for n, p in named if p.requires_grad and n not in ignored}


def _check_parameters(parameters: Parameters, model: TorchDDP) -> None:
    for name, param in parameters.items():
        if param.dtype not in _DTYPES:
            raise TypeError(f"communication hooks take {_ALLOWED}, but parameter {name!r} is {param.dtype}")
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise RuntimeError(f"embedding {name!r} has sparse=True, which communication hooks do not support")
