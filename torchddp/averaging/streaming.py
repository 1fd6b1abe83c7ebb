"""Streaming DiLoCo: synchronizes a fragment of the parameters at a time, while inner steps continue."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from torchddp.averaging.diloco import OuterFactory, OuterLoop
from torchddp.averaging.flat import DEFAULT_CAP_MB, Wire, average_flat, lost_peer, plan_buckets, wire_of
from torchddp.averaging.parameters import ParamSource
from torchddp.comm_hooks.exchange import Exchange
from torchddp.traffic import Traffic
from torchddp.transport.waits import wait_for_future
from torchddp.transport.worker import Worker

_GRACE_S = 10.0
_MOST_MESSAGES = 4  # for one mean, sequentially: two within a host, two between hosts


@dataclass
class _OnTheWay:
    """A fragment whose mean is being computed, and the step after which it is merged."""

    fragment: int
    due: int
    flats: list[torch.Tensor]  # one per bucket; means once the future is done
    future: torch.futures.Future[torch.Tensor] | None = None  # None: they are already means
    sent_before: int = 0  # bytes


class StreamingDiLoCo(OuterLoop):
    """DiLoCo on a part of the parameters at a time, overlapped with inner steps (Douillard et al. 2025).

    Example:

        inner = torch.optim.AdamW(module.parameters(), lr=1e-3)
        optimizer = torchddp.averaging.StreamingDiLoCo(module, inner, sync_every=100, fragments=4, overlap_steps=5)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(module(batch)).backward()
            optimizer.step()
        optimizer.finish()

    Each fragment (every F-th layer) is synchronized every ``sync_every`` steps, evenly spread. A thread averages its
    outer gradients during ``overlap_steps`` more steps; then the outer optimizer moves the global weights, and the
    rank's parameters become ``alpha`` times themselves plus 1 - ``alpha`` times the global ones. Peak bandwidth falls
    by the number of fragments. With one fragment, no overlap and ``alpha=0`` this is `DiLoCo`.

    Args:
        fragments: the number of fragments (F), at most one per parameter.
        overlap_steps: inner steps while a fragment is in transit (tau). Must be below ``sync_every / fragments``, so
            that only one is in transit at a time.
        alpha: the weight of the rank's own parameters; 0: it continues from the global weights.
        wire: see `DiLoCo`.
        bucket_cap_mb: MiB per message; the messages of a fragment are sent one after the other.

    For the other arguments, collectives and errors, see `DiLoCo`. Global weights are the same on all ranks, bit for
    bit. If ``alpha`` is 0, so are a fragment's parameters right after it is merged. A lost peer is detected when the
    fragment is merged.

    Held per rank: the parameters in fp32, the outer momentum, and a fragment in fp32 while it is in transit.
    """

    _key = "streaming_diloco"

    def __init__(
        self,
        params: ParamSource,
        optimizer: Optimizer,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        outer_optimizer: OuterFactory | None = None,
        wire: Wire | None = "int4",
        *,
        fragments: int = 4,
        overlap_steps: int = 0,
        alpha: float = 0.0,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = DEFAULT_CAP_MB,
    ) -> None:
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha must be at least 0 and below 1 (1 would never merge the ranks), got {alpha}")
        options = f", {fragments=}, {overlap_steps=}, {alpha=}"
        outer = (outer_lr, outer_momentum, nesterov, outer_optimizer)
        super().__init__(params, optimizer, sync_every, *outer, wire, process_group, options)
        names = plan_fragments(list(self._named), fragments)
        _check_overlap(overlap_steps, sync_every, fragments)
        self.overlap_steps, self.alpha = overlap_steps, alpha
        self.fragments = [plan_buckets({n: self._named[n] for n in part}, bucket_cap_mb) for part in names]
        self._starts = fragment_starts(sync_every, fragments)
        self._exchange = Exchange(self.process_group, next(iter(self._named.values())).device)
        self._worker = Worker("torchddp_averaging")
        self._on_the_way: _OnTheWay | None = None

    @torch.no_grad()
    def after_step(self) -> None:
        self.steps += 1
        self._merge_if_due()
        in_round = (self.steps - 1) % self.sync_every + 1
        if in_round in self._starts:
            self._start(self._starts.index(in_round))
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

    def _start(self, fragment: int) -> None:
        buckets = self.fragments[fragment]
        flats = [bucket.new_flat() for bucket in buckets]
        for bucket, flat in zip(buckets, flats, strict=True):
            self._global.pack_moved(bucket, flat)
        job = functools.partial(_average, self._exchange, flats, [wire_of(self._wire, bucket) for bucket in buckets])
        due, sent_before = self.steps + self.overlap_steps, self._exchange.sent_bytes
        future = self._worker.submit(job, f"fragment {fragment}", flats[0].device)
        self._on_the_way = _OnTheWay(fragment, due, flats, future, sent_before)

    def _merge_if_due(self) -> None:
        if self._on_the_way is not None and self._on_the_way.due <= self.steps:
            self.finish()

    def _wait(self, pending: _OnTheWay) -> None:
        """Wait for the means. The thread computes them, whatever step the other ranks are in."""
        if pending.future is None:
            return
        # Each message ends within the process group's time limit.
        limit_s = (self._exchange.time_limit or dist.default_pg_timeout).total_seconds()
        limit_s = _MOST_MESSAGES * limit_s * len(pending.flats) + _GRACE_S
        try:
            if not wait_for_future(pending.future, limit_s):
                raise RuntimeError(f"it did not end within {limit_s:.0f} s")
            pending.future.wait()
        except RuntimeError as error:
            names = [name for bucket in self.fragments[pending.fragment] for name in bucket.named]
            what = f"fragment {pending.fragment}"
            raise lost_peer(self.process_group, "StreamingDiLoCo", self.steps, what, names, error) from error
        payload_bytes = sum(flat.nbytes for flat in pending.flats)
        self.traffic = Traffic(payload_bytes, self._exchange.sent_bytes - pending.sent_before)
        pending.future = None

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """See `DiLoCo`. Waits for a fragment in transit and saves it, without disturbing the run."""
        state = super().state_dict()
        pending = self._on_the_way
        if pending is not None:
            self._wait(pending)
            means = {
                name: view.clone()
                for bucket, flat in zip(self.fragments[pending.fragment], pending.flats, strict=True)
                for name, view in zip(bucket.named, bucket.views(flat), strict=True)
            }
            state[self._key]["on_the_way"] = {"fragment": pending.fragment, "due": pending.due, "means": means}
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `DiLoCo`. ValueError if ``fragments`` was different and a fragment was in transit."""
        if self._on_the_way is not None:
            self._wait(self._on_the_way)
        arriving = self._saved_on_the_way(state_dict.get(self._key, {}).get("on_the_way"))
        super().load_state_dict(state_dict)
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


def _average(exchange: Exchange, flats: list[torch.Tensor], wires: list[str]) -> torch.Tensor:
    """Runs on the thread and holds no reference to the model. On a device, the future waits for its stream."""
    for flat, wire in zip(flats, wires, strict=True):
        average_flat(exchange, flat, wire)
    return flats[0]


def _check_overlap(overlap_steps: int, sync_every: int, fragments: int) -> None:
    if fragments > sync_every:
        raise ValueError(f"fragments must be at most sync_every={sync_every}, one per step, got {fragments}")
    if not 0 <= overlap_steps < sync_every // fragments:
        raise ValueError(
            f"overlap_steps must be at least 0 and below sync_every // fragments = {sync_every // fragments}, so that "
            f"one fragment is in transit at a time, got {overlap_steps}"
        )


def plan_fragments(names: Sequence[str], fragments: int) -> list[list[str]]:
    """Names by fragment: each takes every ``fragments``-th layer ("strided" in Douillard et al. 2025).

    A layer is a name up to its first number ("blocks.3.attention.weight": "blocks.3"), or else a module. If there are
    fewer layers than fragments, each parameter counts as one. ValueError: too few or too many fragments.
    """
    if not 1 <= fragments <= len(names):
        raise ValueError(
            f"fragments must be at least 1 and at most {len(names)}, the number of parameters, got {fragments}"
        )
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
