"""Worker side of the memory part: the memory of one variant on each rank, in its own processes."""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from benchmarks.sharded.builders import build, prepare
from benchmarks.sharded.field import missing_package
from benchmarks.sharded.proof import first_problem
from benchmarks.sharded.trainer import Trainer, storage_bytes
from torchddp.bench.cases import Job
from torchddp.bench.memory import parse_bytes, pay_fixed_costs, reset_peak
from torchddp.harness.models import describe_model, find_model, make_batch, make_model, run_forward
from torchddp.harness.variants import Role

WARMUP_STEPS, MEASURED_STEPS = 4, 3


@dataclass(frozen=True)
class Holding:
    """A rank's memory after backward, before the update; the last three in excess of a process with the bare model."""

    parameter_bytes: int
    gradient_bytes: int
    # Of the reducer's buckets, of which gradients may be views; None if it does not report it.
    bucket_bytes: int | None
    state_bytes: int
    # Private memory plus this rank's share of shared memory.
    pss_bytes: int
    shared_bytes: int
    # VmHWM over whole steps.
    peak_bytes: int


@dataclass(frozen=True)
class Resident:
    """The kernel's numbers for this process."""

    pss_bytes: int
    shared_bytes: int
    rss_bytes: int

    @classmethod
    def now(cls) -> Resident:
        """Read /proc."""
        gc.collect()
        status = Path("/proc/self/status").read_text()
        return cls(
            pss_bytes=parse_bytes(Path("/proc/self/smaps_rollup").read_text(), "Pss"),
            shared_bytes=parse_bytes(status, "RssShmem"),
            rss_bytes=parse_bytes(status, "VmRSS"),
        )


def _bare_process(job: Job, model: str, module: nn.Module, batch: Any) -> Resident:
    """The memory without any variant: libraries, threads, the model; its gradients are dropped."""
    pay_fixed_costs()
    find_model(model, job.seed).loss(run_forward(module, batch)).backward()
    module.zero_grad(set_to_none=True)
    dist.barrier()
    return Resident.now()


def _holding(trainer: Trainer, batch: Any, bare: Resident) -> Holding:
    for _ in range(WARMUP_STEPS):
        trainer.step(batch)
    trainer.backward(batch)
    dist.barrier()  # Pss depends on what the others have mapped
    held = Resident.now()
    reducer = getattr(trainer.module, "reducer", None)
    bucket_memory = getattr(reducer, "bucket_memory_bytes", None)
    gradient_bytes = storage_bytes(trainer.gradient_tensors())
    state_bytes = storage_bytes(trainer.state_tensors())
    parameter_bytes = storage_bytes(trainer.parameter_tensors())
    dist.barrier()
    trainer.update()
    if not reset_peak():
        raise OSError("/proc/self/clear_refs can't be written, so a step's peak can't be measured")
    for _ in range(MEASURED_STEPS):
        trainer.step(batch)
    return Holding(
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        bucket_bytes=bucket_memory() if callable(bucket_memory) else bucket_memory,
        state_bytes=state_bytes,
        pss_bytes=held.pss_bytes - bare.pss_bytes,
        shared_bytes=held.shared_bytes - bare.shared_bytes,
        peak_bytes=parse_bytes(Path("/proc/self/status").read_text(), "VmHWM") - bare.rss_bytes,
    )


def measure(job: Job, rank: int, _channel: Connection) -> dict[str, Any]:
    """Measures the job's variant on its model: the memory of each rank, or why the variant was left out."""
    (variant,), (model,) = job.variants, job.models
    found: list[Holding] = []

    def attempt() -> None:
        prepare(variant)
        module, batch = make_model(model, job.seed), make_batch(model, job.seed, rank, 0)
        bare = _bare_process(job, model, module, batch)
        trainer = build(variant, module)
        trainer.loss = find_model(model, job.seed).loss
        found.append(_holding(trainer, batch, bare))

    package = missing_package(variant)
    reason = f"{package} is not installed" if package else first_problem(attempt)
    if reason and variant.role is Role.OURS:
        raise RuntimeError(f"'{variant.name}' on model '{model}': {reason}")
    by_rank: list[Any] = [None] * job.world_size
    dist.all_gather_object(by_rank, None if reason else asdict(found[0]))
    return {
        **describe_model(model, make_model(model, job.seed), job.seed),
        "left_out": reason,
        "ranks": None if reason else by_rank,
    }
