"""Worker side of the models: build the variants on the device, check gradients, time steps, count kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu import trace
from benchmarks.gpu.cases import GpuJob
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.models import MODELS, make_batch, make_model
from torchddp.bench.timing import check_gradients, gradients_of, timed_rounds, warm_up, wrap_copies
from torchddp.harness.launch import Report
from torchddp.harness.stats import slowest_rank
from torchddp.harness.variants import Variant

TRACED_STEPS = 3


@dataclass
class GpuRunner:
    """A variant that is built and ready to step on the device."""

    variant: Variant
    modules: list[nn.Module]
    clock: Clock
    precision: Callable[[], Any]  # the context that forward runs in
    set_to_none: bool

    def step(self, batch: Tensor, world_size: int = 1) -> tuple[float, float]:
        """One forward and backward from an idle device; ms until done, and until the host was free."""
        for module in self.modules:
            module.zero_grad(set_to_none=self.set_to_none)
        self.clock.wait()
        if world_size > 1:
            dist.barrier()
        return self.clock.time(lambda: self._forward_backward(batch))

    def _forward_backward(self, batch: Tensor) -> None:
        for module in self.modules:
            with self.precision():
                loss = module(batch)
            loss.backward()

    def gradients(self) -> list[tuple[str, Tensor]]:
        """Gradients by the name of their parameter in the bare model."""
        return [named for module in self.modules for named in gradients_of(self.variant, module)]

    @property
    def transport(self) -> str | None:
        """The transport's name, if the wrapper reports one."""
        return getattr(getattr(self.modules[0], "reducer", None), "transport_name", None)


def pick_device(job: GpuJob, rank: int) -> torch.device:
    """Assigns ranks to GPUs round-robin; with more ranks than GPUs, several share one."""
    if job.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def build_runners(job: GpuJob, name: str, device: torch.device) -> list[GpuRunner]:
    """Each variant's wrappers over copies of one model on the device, all in this process group."""
    original = make_model(job, name).to(device)
    device_ids = [device.index] if device.type == "cuda" else None

    def wrap(cls: type, module: nn.Module, options: dict[str, Any]) -> nn.Module:
        wrapped: nn.Module = cls(module, device_ids=device_ids, **options)
        return wrapped

    def precision() -> Any:
        if MODELS[name].autocast:
            return torch.autocast(device.type, torch.bfloat16)
        return contextlib.nullcontext()

    clock = Clock(device)
    by_model = [wrap_copies(original, job.variants, wrap) for _ in range(job.way.models)]
    return [
        GpuRunner(variant, list(modules), clock, precision, job.way.set_to_none)
        for variant, *modules in zip(job.variants, *by_model, strict=True)
    ]


def count_work(runner: GpuRunner, batch: Tensor) -> trace.Counts:
    """Counts the work that a step of this variant gives to the device."""

    def steps() -> None:
        for _ in range(TRACED_STEPS):
            runner.step(batch)

    return trace.count(trace.record(steps), TRACED_STEPS)


def time_model(job: GpuJob, name: str, rank: int, device: torch.device, report: Report) -> dict[str, Any]:
    """Interleaved step times of all variants and their kernels per step; checks gradients before and after timing."""
    runners = build_runners(job, name, device)
    batch, other_batch = (make_batch(job, name, rank, index).to(device) for index in (0, 1))
    warm_up(runners, batch, job)
    tolerance = MODELS[name].tolerance
    # Not the warm-up's batch, so that a stale gradient is noticed.
    check_gradients(job, name, runners, other_batch, tolerance)
    times_ms = timed_rounds(runners, batch, job, report)  # [clock, variant, round]
    check_gradients(job, name, runners, other_batch, tolerance)
    by_rank: list[Any] = [None] * job.world_size
    dist.all_gather_object(by_rank, times_ms)
    step_ms, host_ms = (slowest_rank(np.stack([times[clock] for times in by_rank])) for clock in (0, 1))
    parameters = [parameter for module in runners[0].modules for parameter in module.parameters()]
    return {
        "model": name,
        "title": ", ".join(filter(None, (MODELS[name].title, job.way.name))),
        "parameters": len(parameters),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "step_ms": step_ms,
        "host_ms": host_ms,
        "work": [asdict(count_work(runner, batch)) for runner in runners],
        "transports": [runner.transport for runner in runners],
    }
