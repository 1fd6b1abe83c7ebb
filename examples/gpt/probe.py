"""Exposed communication: how much longer forward and backward take because gradients are exchanged."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from examples.gpt.metrics import WARMUP_STEPS_NOT_TIMED, peak_rss_bytes
from examples.gpt.ranks import Ranks

ForwardBackward = Callable[[bool], float]  # argument: exchange gradients?


@dataclass
class CommunicationProbe:
    """On every `every`-th step, times the step's forward and backward once more without synchronization.

    The extra pass has no side effects: its gradients are dropped and the random number generators are restored, so
    losses are the same with and without it. It runs alternately before and after the step, so that neither pass
    always has warm caches.
    """

    model: nn.Module
    ranks: Ranks
    every: int
    first_step: int
    measured: list[dict[str, Any]] = field(default_factory=list)
    training_peak_rss_bytes: int | None = None

    def wants(self, step: int) -> bool:
        """Whether to measure 0-based `step`."""
        since_start = step - self.first_step
        return bool(self.every) and since_start >= WARMUP_STEPS_NOT_TIMED and since_start % self.every == 0

    def around(self, step: int, forward_backward: ForwardBackward, finish: Callable[[], None]) -> float:
        """Run a whole step (`forward_backward`, then `finish`) and an unsynchronized pass; return the loss."""
        if self.training_peak_rss_bytes is None:
            # Read the peak before this pass, which, unlike training, holds gradients in addition to the buckets.
            self.training_peak_rss_bytes = peak_rss_bytes()
        local_first = len(self.measured) % 2 == 0
        local_ms = self._time_local(forward_backward) if local_first else 0.0
        synchronized_ms, loss = self._time(forward_backward, exchange=True)
        finish()
        if not local_first:
            local_ms = self._time_local(forward_backward)
        self.measured.append({"step": step + 1, "synchronized_ms": synchronized_ms, "local_ms": local_ms})
        return loss

    def averaged(self) -> list[dict[str, Any]]:
        """The measurements as means over the ranks (a collective call)."""
        world_size = self.ranks.world_size
        flat = [value for entry in self.measured for value in (entry["synchronized_ms"], entry["local_ms"])]
        means = [total / world_size for total in self.ranks.sums(flat)]
        pairs = zip(self.measured, means[::2], means[1::2], strict=True)
        return [
            {"step": entry["step"], "synchronized_ms": both, "local_ms": local, "exposed_ms": both - local}
            for entry, both, local in pairs
        ]

    def _time_local(self, forward_backward: ForwardBackward) -> float:
        devices = [self.ranks.device.index] if self.ranks.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            self.model.zero_grad(set_to_none=True)
            elapsed_ms, _ = self._time(forward_backward, exchange=False)
            self.model.zero_grad(set_to_none=True)
        return elapsed_ms

    def _time(self, forward_backward: ForwardBackward, *, exchange: bool) -> tuple[float, float]:
        self.ranks.barrier()  # waiting for a late rank doesn't count as communication
        start = time.perf_counter()
        loss = forward_backward(exchange)  # reads the loss, so it returns after the device has finished
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)
        return (time.perf_counter() - start) * 1e3, loss
