"""The case `memory`: the peak memory of each variant, measured in its own processes."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn

from torchddp.bench.cases import ONE_CAP_MB, BenchCase, Job, Settings
from torchddp.bench.results import describe_variant, draw_bars, model_result, variants_table
from torchddp.bench.timing import MIN_WARMUP_STEPS, build_runners, gathered
from torchddp.harness.command import Display
from torchddp.harness.launch import Place, Report
from torchddp.harness.models import describe_model, make_batch
from torchddp.harness.tables import MB
from torchddp.harness.variants import Role, Variant

MEASURED_STEPS = 5
_KEYS = ("peak_rss_bytes", "peak_shared_once_bytes", "grad_storage_bytes")
# glibc keeps freed blocks smaller than its threshold, which grows. With a low, fixed threshold every gradient is its
# own mapping, so the resident set shows only memory still in use.
ALLOCATOR_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def reset_peak() -> bool:
    """Reset the kernel's high-water mark; return False if that is not allowed."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def parse_bytes(text: str, key: str) -> int:
    """Parse the kB line `key` of /proc/<pid>/status or smaps_rollup, in bytes. Raises ValueError if there is none."""
    for line in text.splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {key} line in the text")


def _peak_rss_bytes() -> int:
    try:
        return parse_bytes(Path("/proc/self/status").read_text(), "VmHWM")
    except (OSError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _share_of_others() -> int:
    """The other processes' share of the shared memory in this one's resident set; 0 if the kernel doesn't tell."""
    try:
        rolled, status = (Path("/proc/self", name).read_text() for name in ("smaps_rollup", "status"))
        return parse_bytes(status, "RssShmem") - parse_bytes(rolled, "Pss_Shmem")
    except (OSError, ValueError):
        return 0


def pay_fixed_costs() -> None:
    """Import and start what a process's first DDP model does: more memory than a small model's gradients."""
    tiny = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    tiny(torch.ones(1, 1)).sum().backward()


def measure_memory(job: Job, model_name: str, _report: Report) -> dict[str, Any]:
    """Bytes at the peak of a few steady steps: resident, with shared memory counted once, and held by `.grad`."""
    pay_fixed_costs()
    (runner,) = build_runners(job, model_name)
    batch = make_batch(model_name, job.seed, dist.get_rank(), 0)
    for _ in range(MIN_WARMUP_STEPS):
        runner.step(batch)
    was_reset = reset_peak()
    for _ in range(MEASURED_STEPS):
        runner.step(batch)
    held = [p.grad.untyped_storage() for p in runner.module.parameters() if p.grad is not None]
    storages = {storage.data_ptr(): storage.nbytes() for storage in held}
    peak = _peak_rss_bytes()
    mine = dict(zip(_KEYS, (peak, peak - _share_of_others(), sum(storages.values())), strict=True))
    by_rank = gathered(mine)
    return {
        **describe_model(model_name, runner.module, job.seed),
        **{key: max(entry[key] for entry in by_rank) for key in mine},
        "method": "VmHWM over the measured steps" if was_reset else "peak since the process started",
    }


def _run(case: BenchCase, settings: Settings, display: Display) -> Iterator[dict[str, Any]]:
    """Launch each variant separately, so that leftovers of one do not count for the next."""
    job = settings.job_of(case)
    each, launches = len(job.variants), len(job.models) * len(job.variants)
    for number, model in enumerate(job.models):
        raws: list[dict[str, Any]] = []
        for index, variant in enumerate(job.variants, number * each):
            display.start(case.name)
            display.update(f"{model}, {variant.name}", index, launches)
            raws += case.launch(
                replace(job, models=(model,), variants=(variant,)), display, Place(ALLOCATOR_ENVIRONMENT)
            )
        yield memory_result(job.variants, raws, job.world_size)


def memory_result(variants: Sequence[Variant], raws: Sequence[dict[str, Any]], world_size: int) -> dict[str, Any]:
    local = next(raw for variant, raw in zip(variants, raws, strict=True) if variant.role is Role.LOCAL)
    rows = []
    for variant, raw in zip(variants, raws, strict=True):
        row = {**describe_variant(variant), **{key: raw[key] for key in _KEYS}}
        row["extra_bytes"] = raw["peak_shared_once_bytes"] - local["peak_shared_once_bytes"]
        # 1.0 means one whole additional copy of the gradients.
        row["extra_gradient_copies"] = row["extra_bytes"] / local["gradient_bytes"]
        rows.append(row)
    return model_result("memory", local, world_size, rows, method=local["method"])


def memory_table(result: dict[str, Any]) -> Table:
    def cells(row: dict[str, Any]) -> list[str]:
        resident, once, held = (f"{row[key] / MB:.1f}" for key in _KEYS)
        extra = [f"{row['extra_bytes'] / MB:.1f}", f"{row['extra_gradient_copies']:.2f}"]
        return [resident, once, *(["", ""] if row["role"] == "local" else extra), held]

    columns = ("resident\nMB", "shared\nonce, MB", "more than\nno DDP, MB", "in copies of\nthe gradients", ".grad\nMB")
    return variants_table(result, columns, cells)


CASE = BenchCase(
    name="memory",
    title="peak memory of a training step (one launch per variant)",
    models=("mlp", "gpt"),
    quick_models=("mlp",),
    unit="MB",
    key="extra_bytes",
    caps_mb=ONE_CAP_MB,
    # Bucket size hardly matters here, and each row costs a launch.
    takes_caps=False,
    measure=measure_memory,
    run=_run,
    table=memory_table,
    draw=partial(draw_bars, key="extra_bytes", label="MB more than no DDP"),
    note=(
        "memory: peak of the largest rank, each variant in its own processes. The resident set has all memory that "
        "ranks of a host share, the other columns count it once. More than no DDP: buckets, the transport's buffers, "
        "and gradients that exist in addition to their bucket."
    ),
)
