"""The case `torchft`: a step under torchft with torchddp's class and with torchft's own.

Two replicas of one rank each, with a lighthouse; the classes take turns under one manager. Needs `pip install torchft`.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from rich.table import Table
from rich.text import Text
from torch import nn

from benchmarks.chaos.lighthouse import lighthouse
from examples.train_torchft import batch_of, make_manager, make_network
from torchddp import fault_tolerance
from torchddp.bench.cases import BenchCase, Job, Result, Settings
from torchddp.bench.results import compared_rows, draw_bars, model_result, variants_table
from torchddp.bench.timing import over_ranks, start_together, timed_rounds, warm_up
from torchddp.harness.command import Display
from torchddp.harness.launch import Place, Report
from torchddp.harness.tables import number, ratio_text
from torchddp.harness.variants import ArgumentError, Role, Variant

DEPTH, WIDTH = 8, 884  # 25 MB of gradients
TIMEOUT_S = 60.0
THEIRS, OURS = "torchft.ddp.DistributedDataParallel", "torchddp.fault_tolerance.DistributedDataParallel"


@dataclass
class Replica:
    """A class around its network, whose steps the manager commits."""

    model: nn.Module
    optimizer: Any
    batch: Any

    def step(self, _batch: Any, world_size: int = 1) -> float:
        """A whole step, from the start of the quorum to the commit; wall time in ms."""
        start_together(world_size)
        start_ns = time.perf_counter_ns()
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        return (time.perf_counter_ns() - start_ns) / 1e6


def measure(job: Job, name: str, report: Report) -> dict[str, Any]:
    """Steps of all classes in turn, of the slower replica."""
    import torch
    from torchft import Optimizer
    from torchft.ddp import DistributedDataParallel as Theirs

    replica = f"replica_{dist.get_rank()}"
    networks = nn.ModuleList(make_network(WIDTH, DEPTH) for _ in job.variants)
    inner = torch.optim.SGD(networks.parameters(), 1e-3)
    manager = make_manager(networks, inner, replica, timeout_s=TIMEOUT_S, min_replicas=job.world_size)
    optimizer, batch = Optimizer(manager, inner), batch_of(0, replica, WIDTH)
    replicas = []
    for variant, network in zip(job.variants, networks, strict=True):
        if variant.class_path == THEIRS:
            model: nn.Module = Theirs(manager, network)
        else:
            model = fault_tolerance.DistributedDataParallel(manager, network, **variant.options)
        replicas.append(Replica(model, optimizer, batch))
    warm_up(replicas, None, job)
    parameters = list(networks[0].parameters())
    return {
        "model": name,
        "title": f"{DEPTH} linear layers",
        "parameters": len(parameters),
        "gradient_bytes": sum(4 * parameter.numel() for parameter in parameters),
        "step_ms": over_ranks(timed_rounds(replicas, None, job, report)),
    }


def field(caps_mb: Sequence[float]) -> tuple[Variant, ...]:
    swept = (Variant(f"torchddp, cap {cap:g}", Role.OURS, OURS, {"bucket_cap_mb": cap}) for cap in caps_mb)
    return (Variant("torchft", Role.TORCH, THEIRS), Variant("torchddp", Role.OURS, OURS), *swept)


def run(case: BenchCase, settings: Settings, display: Display) -> list[Result]:
    if importlib.util.find_spec("torchft") is None:
        raise ArgumentError("The case torchft needs torchft: pip install torchft.")
    job = replace(settings.job_of(case), variants=field(settings.caps_mb or ()))
    display.start(case.name)
    with lighthouse(min_replicas=job.world_size) as address:
        raws = case.launch(job, display, Place({"TORCHFT_LIGHTHOUSE": address, "RUST_LOG": "error"}))
    return [torchft_result(job.variants, raw, job.world_size) for raw in raws]


def torchft_result(variants: Sequence[Variant], raw: dict[str, Any], world_size: int) -> Result:
    best, rows = compared_rows(variants, raw["step_ms"])
    about = {"unit": "ms", "rounds": int(raw["step_ms"].shape[1]), "best_torch": best}
    return model_result("torchft", raw, world_size, rows, **about)


def table(result: Result) -> Table:
    def cells(row: dict[str, Any]) -> list[str | Text]:
        times = (number(row["step_ms"][key]) for key in ("median", "p90"))
        return [*times, ratio_text(row["ratio_to_best_torch"], without="1")]

    return variants_table(result, ("step p50\nms", "step\np90", "to torchft's\np50 [95% CI]"), cells)


CASE = BenchCase(
    name="torchft",
    title="a step of a replica under torchft, with torchddp's class and with torchft's",
    models=(),
    caps_mb=(),
    measure=measure,
    run=run,
    table=table,
    draw=partial(draw_bars, key="step_ms", label="step, ms (p25..p75)"),
    note="torchft: a whole step, from the start of the quorum to the commit, of the slower of two replicas.",
)
