"""DiLoCo: many local steps, then one outer optimizer step on their average displacement."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torchddp import _torch
from torchddp.averaging.flat import (
    DEFAULT_CAP_MB,
    FlatBucket,
    FlatMeans,
    Named,
    ParamSource,
    Wire,
    average_flat,
    broadcast_from_first,
    buffers_now,
    check_wire,
    group_or_default,
    lost_peer,
    named_buffers,
    named_parameters,
    plan_buckets,
    problem_of,
    sum_dtype,
    verify_same,
    wire_of,
)
from torchddp.averaging.optimizers import OptimizerWrapper
from torchddp.comm_hooks.exchange import Exchange
from torchddp.errors import check_count, check_number
from torchddp.traffic import Traffic
from torchddp.transport.agreement import Agreement, in_words
from torchddp.transport.waits import wait_for_future
from torchddp.transport.worker import Worker

_GRACE_S = 10.0
_MOST_MESSAGES = 4  # for one mean, sequentially: two within a host, two between hosts
_KEY = "diloco"  # of our part of a state dict


@dataclass
class _OnTheWay:
    """A fragment whose mean is being computed, and the step after which it is merged."""

    fragment: int
    due: int
    flats: list[torch.Tensor]  # one per bucket; means once the future is done
    future: torch.futures.Future[torch.Tensor] | None = None  # None: they are already means
    sent_before: int = 0  # bytes
    problems: list[str] = field(default_factory=list)  # why ranks must not average it, once the future is done


class DiLoCo(OptimizerWrapper):
    """Any optimizer, with an outer step after every ``sync_every`` steps (DiLoCo, Douillard et al. 2023), or with outer
    steps for a part of the parameters at a time, overlapped with inner steps (Streaming DiLoCo, Douillard et al. 2025).

    Example:

        inner = torch.optim.AdamW(module.parameters(), lr=1e-3)
        optimizer = torchddp.averaging.DiLoCo(module, inner, sync_every=50)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(module(batch)).backward()
            optimizer.step()  # every 50th also takes an outer step

    The outer gradient is how far the parameters have moved since the last outer step, averaged over the ranks. The
    outer optimizer applies it to a copy of the parameters, and all ranks continue from there. Pass the bare module, or
    train a `DistributedDataParallel` under ``no_sync()``.

    With ``fragments``, each fragment (every F-th layer) is synchronized every ``sync_every`` steps, evenly spread: peak
    bandwidth falls by F. Its outer gradients are averaged in the background during ``overlap_steps`` more steps; then
    parameters become ``alpha`` times themselves plus 1 - ``alpha`` times the global ones. At the end, call
    :meth:`finish`.

    Args:
        params: a module, or its parameters (with names, if errors should name them): all that ``optimizer`` steps.
        optimizer: the inner one, any of torch's whose steps are not collective; its state stays local.
        sync_every: the number of inner steps between outer steps (the paper's H).
        outer_lr, outer_momentum, nesterov: options of the outer optimizer, SGD.
        outer_optimizer: a function that takes parameters and returns the outer optimizer, to use another one than SGD.
        wire: the format in which outer gradients are sent: "fp32", "bf16", "fp16", "int8" or "int4" (in blocks with one
            scale each). Sums are always in fp32. None: the parameter's own format if it has 16 bits, otherwise fp32.
        fragments: the number of fragments (F), at most one per parameter.
        overlap_steps: inner steps while a fragment is in transit (tau), below ``sync_every / fragments``. 0: wait.
        alpha: the weight of the rank's own parameters; 0: it continues from the global weights.
        buffers: average floating-point buffers too, after the last fragment; ``params`` must be a module.
        process_group: the ranks to average over; None: the default process group.
        bucket_cap_mb: MiB per message; the messages of a fragment are sent one after the other.

    Construction is collective: parameters become those of rank 0 (load checkpoints afterwards). So are the steps in
    which a fragment is merged. Global weights are the same on all ranks, bit for bit, and if ``alpha`` is 0, so are a
    fragment's parameters right after it is merged. Held per rank: the parameters in fp32, the outer momentum, and a
    fragment in fp32 while it is in transit.

    Raises TypeError and ValueError for invalid arguments, and RuntimeError on all ranks if they differ between ranks.
    `step` raises TransportError, RuntimeError on all ranks if their step counts, outer options or alpha have come
    to differ, and ValueError when a parameter that was frozen during construction, or is new, has begun to train:
    create another DiLoCo then. Attributes: ``steps`` that the inner optimizer has taken; ``traffic``, the bytes of the
    last synchronization of a fragment (`torchddp.traffic`).
    """

    def __init__(
        self,
        params: ParamSource,
        optimizer: Optimizer,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        outer_optimizer: OuterFactory | None = None,
        wire: Wire | None = None,
        *,
        fragments: int = 1,
        overlap_steps: int = 0,
        alpha: float = 0.0,
        buffers: bool = False,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = DEFAULT_CAP_MB,
    ) -> None:
        self.process_group = group_or_default(process_group)
        self.sync_every, self.overlap_steps, self.alpha = sync_every, overlap_steps, alpha
        self.steps = 0
        self.traffic = Traffic(0, 0)
        self._wire = wire
        outer = {"outer_lr": outer_lr, "outer_momentum": outer_momentum, "nesterov": nesterov}
        steps = {"sync_every": sync_every, "fragments": fragments, "overlap_steps": overlap_steps, "alpha": alpha}
        sent = {"outer_optimizer": outer_optimizer, "wire": wire, "bucket_cap_mb": bucket_cap_mb}
        with Agreement("DiLoCo", self.process_group) as agreement:
            make_outer = outer_factory(outer_optimizer, outer_lr, outer_momentum, nesterov)
            averaged_buffers = named_buffers(params, buffers)
            super().__init__(optimizer)
            check_count("sync_every", sync_every, 1, " step")
            below_1 = "at least 0 and below 1 (1 would never merge the ranks)"
            check_number("alpha", alpha, lambda share: 0 <= share < 1, below_1)
            self._named = named_parameters(params)
            self._check_stepped()
            self._check_real()
            check_wire(wire, self._named)
            check_overlap(overlap_steps, sync_every, fragments)
            everything = {**self._named, **averaged_buffers}
            if problem := problem_of(everything):
                raise problem
            names = plan_fragments(list(self._named), fragments)
            self.fragments = [plan_buckets({n: self._named[n] for n in part}, bucket_cap_mb) for part in names]
            verify_same(everything, agreement, {**outer, **steps, **sent})
        self._starts = fragment_starts(sync_every, fragments)
        broadcast_from_first(self._named.values(), self.process_group)
        with Agreement("DiLoCo", self.process_group) as agreement:
            self._global = GlobalWeights(self._named, make_outer)
            agreement.verify(options={"outer_optimizer": in_words(self.outer_optimizer)})
        self._exchange = Exchange(self.process_group, next(iter(self._named.values())).device)
        self._worker = Worker("torchddp_averaging")
        self._pid = os.getpid()  # a forked child does not have the worker's thread
        self._on_the_way: _OnTheWay | None = None
        self._buffers = None
        if averaged_buffers:
            assert isinstance(params, nn.Module)
            self._buffers_now = functools.partial(buffers_now, params, averaged_buffers)
            self._buffers = FlatMeans(averaged_buffers, self.process_group, "DiLoCo", bucket_cap_mb)

    def _check_stepped(self) -> None:
        mine = {id(p) for p in self._named.values()}
        for name, param in named_parameters(self.param_groups).items():
            if id(param) not in mine:
                raise ValueError(f"the optimizer steps {name} (shape {list(param.shape)}), which is not averaged")

    def _check_real(self) -> None:
        for name, param in self._named.items():
            if param.is_complex():
                raise TypeError(f"parameter '{name}' is {param.dtype}: outer steps need real parameters")

    @property
    def outer_optimizer(self) -> Optimizer:
        """Updates the global weights; its learning rate may be scheduled, equally on all ranks."""
        return self._global.optimizer

    @property
    def global_weights(self) -> Named:
        """By name: the weights that all ranks agree on, in at least fp32. Read-only."""
        return {name: weight.detach() for name, weight in self._global.weights.items()}

    @torch.no_grad()
    def after_step(self) -> None:
        self.steps += 1
        self._merge_if_due()
        in_round = (self.steps - 1) % self.sync_every + 1
        if in_round in self._starts:
            self._start(self._starts.index(in_round), f"step {self.steps}")
            self._merge_if_due()  # without overlap

    @torch.no_grad()
    def finish(self) -> None:
        """Merge what is in transit now, at the end of training. All ranks must call it after the same step."""
        arrived = self._on_the_way
        if arrived is None:
            return
        self._wait(arrived)
        self._on_the_way = None
        for bucket, flat in zip(self.fragments[arrived.fragment], arrived.flats, strict=True):
            self._global.step(bucket, flat, self.alpha)
        if self._buffers is not None and arrived.fragment == len(self.fragments) - 1:
            self._buffers.use(self._buffers_now())
            self._buffers.average(self.steps)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Take an outer step with all parameters now, whatever the count. Collective."""
        self.finish()
        for fragment in range(len(self.fragments)):
            self._start(fragment, "synchronize()")
            self.finish()

    def _start(self, fragment: int, place: str) -> None:
        self._check_stepped()  # again: the program may have thawed or replaced parameters
        if self._buffers is not None:
            self._buffers_now()  # raises before anything is sent
        buckets = self.fragments[fragment]
        flats = [bucket.new_flat() for bucket in buckets]
        for bucket, flat in zip(buckets, flats, strict=True):
            self._global.pack_moved(bucket, flat)
        state = f"{place} with {in_words(self.outer_optimizer)} and alpha {self.alpha}"
        wires = [wire_of(self._wire, bucket) for bucket in buckets]
        problems: list[str] = []
        job = functools.partial(_average, self._exchange, flats, wires, state, problems)
        due, sent_before = self.steps + self.overlap_steps, self._exchange.sent_bytes
        future = self._worker.submit(job, f"fragment {fragment}", flats[0].device)
        self._on_the_way = _OnTheWay(fragment, due, flats, future, sent_before, problems)

    def _merge_if_due(self) -> None:
        if self._on_the_way is not None and self._on_the_way.due <= self.steps:
            self.finish()

    def _wait(self, pending: _OnTheWay) -> None:
        """Wait for the means. On a CPU they come whatever step the other ranks are in."""
        if pending.future is None:
            return
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"fragment {pending.fragment} is in transit to the process that forked this one, and will not arrive "
                "here: save checkpoints in the process that created DiLoCo"
            )
        # Each message ends within the process group's time limit.
        limit_s = (self._exchange.time_limit or dist.default_pg_timeout).total_seconds()
        limit_s = _MOST_MESSAGES * limit_s * (len(pending.flats) + 1) + _GRACE_S  # one more compares the ranks
        try:
            if not wait_for_future(pending.future, limit_s):
                raise RuntimeError(f"it did not end within {limit_s:.0f} s")
            pending.future.wait()
        except RuntimeError as error:
            names = [name for bucket in self.fragments[pending.fragment] for name in bucket.named]
            what = f"fragment {pending.fragment} of {len(self.fragments)}"
            cause = self._worker.error or error
            raise lost_peer(self.process_group, "DiLoCo", self.steps, what, names, cause) from cause
        if pending.problems:
            self._on_the_way = None  # all ranks may load a checkpoint, and go on
            how = "Take the same steps and change outer options alike on all ranks; to go on, load one state on all"
            raise RuntimeError(f"DiLoCo can't merge its ranks: {pending.problems[0]}. {how}")
        payload_bytes = sum(flat.nbytes for flat in pending.flats)
        self.traffic = Traffic(payload_bytes, self._exchange.sent_bytes - pending.sent_before)
        pending.future = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported: the outer optimizer's state belongs to the constructor's parameters."""
        raise RuntimeError("DiLoCo can't add parameters: create it after adding all groups")

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state and, under "diloco", the step, the global weights and the outer optimizer.

        Between synchronizations each rank saves its own model and optimizer. Waits for and saves a fragment in transit.
        """
        own = {"step": self.steps, **self._global.state_dict()}
        pending = self._on_the_way
        if pending is not None:
            self._wait(pending)
            means = {
                name: view.clone()
                for bucket, flat in zip(self.fragments[pending.fragment], pending.flats, strict=True)
                for name, view in zip(bucket.named, bucket.views(flat), strict=True)
            }
            own["on_the_way"] = {"fragment": pending.fragment, "due": pending.due, "means": means}
        return {**self._inner.state_dict(), _KEY: own}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores training exactly, together with the model's state, in any order.

        ValueError, before anything changes, for the state of another optimizer or model, or of other fragments one of
        which was in transit.
        """
        if _KEY not in state_dict:
            raise ValueError(
                f"the state dict has no '{_KEY}': it was saved by another optimizer, or went through get_state_dict of "
                "torch.distributed.checkpoint, which drops it. Save DiLoCo's own state_dict()"
            )
        saved = state_dict[_KEY]
        self._global.check(saved)
        if self._on_the_way is not None:
            self._wait(self._on_the_way)
        arriving = self._saved_on_the_way(saved.get("on_the_way"))
        self._inner.load_state_dict(state_dict)  # raises first if its groups don't fit
        self._global.load_state_dict(saved)
        self.steps = saved["step"]
        self._on_the_way = arriving

    def _saved_on_the_way(self, saved: dict[str, Any] | None) -> _OnTheWay | None:
        if saved is None:
            return None
        buckets = self.fragments[saved["fragment"]] if saved["fragment"] < len(self.fragments) else []
        if {name for bucket in buckets for name in bucket.named} != set(saved["means"]):
            raise ValueError("a fragment was in transit when the state was saved, but the fragments are different now")
        flats = [bucket.new_flat() for bucket in buckets]
        for bucket, flat in zip(buckets, flats, strict=True):
            for name, view in zip(bucket.named, bucket.views(flat), strict=True):
                view.copy_(saved["means"][name])
        return _OnTheWay(saved["fragment"], saved["due"], flats)


def _average(
    exchange: Exchange, flats: list[torch.Tensor], wires: list[str], state: str, problems: list[str]
) -> torch.Tensor:
    """Runs on the worker and holds no reference to the model.

    ``state``: what the outer step depends on besides the mean. If it differs, all ranks find a problem instead.
    """
    states = exchange.each_ranks(zlib.crc32(state.encode()), flats[0].device)
    if others := [str(rank) for rank, other in enumerate(states) if other != states[exchange.rank]]:
        problems.append(f"rank {exchange.rank} is at {state}, unlike rank {', '.join(others)}")
        return flats[0]
    for flat, wire in zip(flats, wires, strict=True):
        average_flat(exchange, flat, wire)
    return flats[0]


OuterFactory = Callable[[list[nn.Parameter]], Optimizer]


class GlobalWeights:
    """A copy of the parameters in at least fp32, and the outer optimizer, which applies the mean displacement."""

    def __init__(self, local: Named, make_optimizer: OuterFactory) -> None:
        self._local = local
        self.weights = {name: nn.Parameter(p.detach().to(sum_dtype(p.dtype), copy=True)) for name, p in local.items()}
        self.optimizer = make_optimizer(list(self.weights.values()))
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(f"outer_optimizer must return an optimizer, got {type(self.optimizer).__name__}")

    def pack_moved(self, bucket: FlatBucket, flat: torch.Tensor) -> None:
        views = bucket.views(flat)
        for view, name in zip(views, bucket.named, strict=True):
            # Relative to what the ranks received: rounding to 16 bits is not a displacement.
            view.copy_(self.weights[name].detach().to(bucket.dtype))
        _torch.foreach_sub_(views, [local.detach().to(flat.dtype) for local in bucket.named.values()])

    def step(self, bucket: FlatBucket, flat: torch.Tensor, alpha: float) -> None:
        """Update the weights of a bucket with their outer gradient, which the optimizer may overwrite.

        The rank's own parameters become ``alpha`` times themselves plus 1 - ``alpha`` times these.
        """
        for name, view in zip(bucket.named, bucket.views(flat), strict=True):
            # Without this, a frozen one, where the ranks agree on it, would coast on the outer momentum.
            if self._local[name].requires_grad or view.any():
                self.weights[name].grad = view
        self.optimizer.step()  # skips parameters without a gradient
        for name in bucket.named:
            self.weights[name].grad = None
            local, weight = self._local[name].detach(), self.weights[name].detach()
            local.copy_(weight if alpha == 0 else torch.lerp(weight, local.to(weight.dtype), alpha))

    def state_dict(self) -> dict[str, Any]:
        weights = {name: weight.detach() for name, weight in self.weights.items()}
        return {"weights": weights, "outer": self.optimizer.state_dict()}

    def check(self, state_dict: dict[str, Any]) -> None:
        """ValueError for the state of another model or outer optimizer."""
        saved = state_dict["weights"]
        if different := sorted(set(saved) ^ set(self.weights)):
            names = ", ".join(map(repr, different[:3]))
            raise ValueError(f"the state dict is of another model: only one of the two has {names}")
        for name, weight in self.weights.items():
            if saved[name].shape != weight.shape:
                shapes = f"{list(saved[name].shape)} in it, {list(weight.shape)} here"
                raise ValueError(f"the state dict is of another model: '{name}' has shape {shapes}")
        theirs, ours = state_dict["outer"]["param_groups"], self.optimizer.param_groups
        sizes = [[len(group["params"]) for group in groups] for groups in (theirs, ours)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the outer optimizer has groups of {sizes[0]} parameters in the state dict, {sizes[1]} here"
            )
        for their, our in zip(theirs, ours, strict=True):
            extra, missing = sorted(set(their) - set(our)), sorted(set(self.optimizer.defaults) - set(their))
            # A scheduler adds options, and a newer torch has more: only another optimizer does both.
            if extra and missing:
                raise ValueError(
                    "the state dict is of another outer optimizer: its groups have "
                    f"{', '.join(map(repr, extra))} and lack {', '.join(map(repr, missing))}"
                )

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(state_dict["weights"][name])
        self.optimizer.load_state_dict(state_dict["outer"])


def outer_factory(
    outer_optimizer: OuterFactory | None, outer_lr: float, outer_momentum: float, nesterov: bool
) -> OuterFactory:
    if isinstance(outer_optimizer, Optimizer):
        raise TypeError("outer_optimizer must be a function: lambda params: torch.optim.SGD(params, lr=0.7)")
    if outer_optimizer is not None:
        if not callable(outer_optimizer):
            raise TypeError(f"outer_optimizer must be a function, got {type(outer_optimizer).__name__}")
        return outer_optimizer
    check_number("outer_lr", outer_lr, lambda lr: lr > 0, "above 0")
    check_number("outer_momentum", outer_momentum, lambda momentum: 0 <= momentum < 1, "at least 0 and below 1")
    use_nesterov = nesterov and outer_momentum > 0
    return lambda params: torch.optim.SGD(params, lr=outer_lr, momentum=outer_momentum, nesterov=use_nesterov)


# --- which parameters are synchronized together, and after which steps (pure) ---


def check_overlap(overlap_steps: int, sync_every: int, fragments: int) -> None:
    check_count("fragments", fragments, 1)
    check_count("overlap_steps", overlap_steps, 0)
    if fragments > sync_every:
        raise ValueError(f"fragments must be at most sync_every={sync_every}, one per step, got {fragments}")
    if overlap_steps >= sync_every // fragments:
        limit = f"below sync_every // fragments = {sync_every // fragments}"
        raise ValueError(f"overlap_steps must be {limit}, got {overlap_steps}")


def plan_fragments(names: Sequence[str], fragments: int) -> list[list[str]]:
    """Names by fragment: each takes every ``fragments``-th layer ("strided" in Douillard et al. 2025).

    A layer is a name up to its first number ("blocks.3.attention.weight": "blocks.3"), or else a module; with fewer
    layers than fragments, each parameter is one. ValueError: too few or too many fragments.
    """
    if not 1 <= fragments <= len(names):
        raise ValueError(f"fragments must be from 1 to at most {len(names)}, the number of parameters, got {fragments}")
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(_layer_of(name), []).append(name)
    units = list(layers.values()) if len(layers) >= fragments else [[name] for name in names]
    return [[name for unit in units[start::fragments] for name in unit] for start in range(fragments)]


def fragment_starts(sync_every: int, fragments: int) -> list[int]:
    """After which step of a round of ``sync_every`` (1 is the first) each fragment's synchronization starts."""
    return [(index + 1) * sync_every // fragments for index in range(fragments)]


def _layer_of(name: str) -> str:
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1]) or name
