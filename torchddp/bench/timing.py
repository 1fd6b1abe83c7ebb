"""The worker side of timed cases: build the variants, check their gradients, time them in turn."""

from __future__ import annotations

import copy
import gc
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchddp.bench.cases import MAX_ROUNDS, MIN_ROUNDS, Job
from torchddp.harness.launch import Report
from torchddp.harness.models import describe_model, find_model, make_batch, make_model, output_is_loss, run_forward
from torchddp.harness.variants import Role, Variant, load_class

# static_graph records in step 1 and rebuilds buckets in step 2, so step 3 is the first steady one.
MIN_WARMUP_STEPS = 3
# torch's DDP times itself in its first ten steps; cheap models skip them as well.
FULL_WARMUP_STEPS = 12
RELATIVE_TOLERANCE = 1e-4
# The time allowed for the broadcast of the start time to reach every rank.
START_DELAY_NS = 1_000_000


Build = Callable[[type, nn.Module, Mapping[str, Any]], nn.Module]


class WrongGradientsError(RuntimeError):
    """A variant computed wrong gradients, so its time is meaningless."""


def start_together(world_size: int) -> None:
    """Collective: return on all ranks of this machine within a few microseconds of each other.

    Ranks leave gloo's barrier up to half a millisecond apart, which would count as the wrapper's time.
    """
    if world_size == 1:
        return
    dist.barrier()
    if world_size > len(os.sched_getaffinity(0)):
        # Ranks can't all run at once; spinning would only keep others from running.
        return
    # perf_counter is CLOCK_MONOTONIC, which all processes of a machine share.
    start_ns = torch.tensor([time.perf_counter_ns() + START_DELAY_NS])
    dist.broadcast(start_ns, src=0)
    agreed_ns = int(start_ns.item())
    while time.perf_counter_ns() < agreed_ns:
        pass


class Steps(Protocol):
    def step(self, batch: Any, world_size: int = 1) -> object:
        """Run one step and return its time, or times."""


@dataclass
class Runner:
    variant: Variant
    module: nn.Module
    loss: Callable[[Any], Tensor] = output_is_loss

    def step(self, batch: Any, world_size: int = 1) -> Any:
        """Run one forward and backward and return their wall time in ms. `world_size` ranks start it together."""
        # Not timed: its cost belongs to the optimizer and is the same for every variant.
        self.module.zero_grad(set_to_none=True)
        start_together(world_size)
        start_ns = time.perf_counter_ns()
        self.loss(run_forward(self.module, batch)).backward()
        return (time.perf_counter_ns() - start_ns) / 1e6

    def gradients(self) -> list[tuple[str, Tensor]]:
        """Pairs of a parameter's name in the bare model and its gradient; zeros for a parameter that no rank used."""
        bare = self.module if self.variant.class_path is None else self.module.get_submodule("module")
        parameters = [(name, p) for name, p in bare.named_parameters() if p.requires_grad]
        return [(name, torch.zeros_like(p) if p.grad is None else p.grad) for name, p in parameters]


def wrap_copies(
    original: nn.Module, variants: Sequence[Variant], build: Build = lambda cls, module, options: cls(module, **options)
) -> list[nn.Module]:
    """Copy the model for each variant; if the variant has a class, wrap the copy by `build(class, copy, options)`."""
    modules = []
    for variant in variants:
        module = copy.deepcopy(original)
        # Steps don't change weights, so copies share them: less memory, and the same cache misses for all variants.
        for mine, shared in zip(module.parameters(), original.parameters(), strict=True):
            mine.data = shared.data
        if variant.class_path is not None:
            module = build(load_class(variant.class_path), module, variant.options)
        modules.append(module)
    return modules


def build_runners(job: Job, model_name: str, kind: type[Runner] = Runner) -> list[Runner]:
    spec = find_model(model_name, job.seed)
    # If all ranks have the same batch, losses are weighted by rank: otherwise averaging gradients would prove nothing.
    weight = 1 if spec.batches_differ else 1 + dist.get_rank()

    def loss(output: Any) -> Tensor:
        return weight * spec.loss(output)

    modules = wrap_copies(make_model(model_name, job.seed), job.variants)
    return [kind(variant, module, loss) for variant, module in zip(job.variants, modules, strict=True)]


def check_gradients(
    job: Job, model_name: str, runners: Sequence[Runner], batch: object, tolerance: float = RELATIVE_TOLERANCE
) -> None:
    """Compare each variant's gradients with the mean over ranks of the bare model's; raise `WrongGradientsError`."""
    local = next(runner for runner in runners if runner.variant.role is Role.LOCAL)
    _same_step(local, batch, job)
    mine = local.gradients()
    # Reduced as one tensor: a thousand small reductions take seconds if ranks share few cores.
    flat = torch.cat([gradient.flatten() for _, gradient in mine])
    dist.all_reduce(flat)
    means = (flat / job.world_size).split([gradient.numel() for _, gradient in mine])
    expected = [(name, mean.view_as(gradient)) for (name, gradient), mean in zip(mine, means, strict=True)]
    for runner in runners:
        if runner is local:
            continue
        _same_step(runner, batch, job)
        for (name, want), (_, got) in zip(expected, runner.gradients(), strict=True):
            _compare(runner.variant, model_name, name, want, got, tolerance)


def _same_step(runner: Runner, batch: object, job: Job) -> None:
    # With dropout, steps are equal only if they draw the same random numbers.
    torch.manual_seed(job.seed)
    runner.step(batch)


def _compare(variant: Variant, model_name: str, name: str, want: Tensor, got: Tensor, tolerance: float) -> None:
    scale, error = (float(values.abs().max()) if values.numel() else 0.0 for values in (want, want - got))
    # A sum in 16 bits is rounded once for each rank, in another order.
    tolerance = max(tolerance, dist.get_world_size() * torch.finfo(got.dtype).eps)
    # `not <=` also catches nan.
    if got.shape != want.shape or not error <= tolerance * scale + 1e-12:
        where = f"'{variant.name}' on model '{model_name}', rank {dist.get_rank()}, parameter '{name}'"
        raise WrongGradientsError(f"{where}: off by {error:.3g}, while the largest gradient is {scale:.3g}")


def one_round(runners: Sequence[Steps], batch: object, order: list[int], world_size: int) -> list[Any]:
    step_ms: list[Any] = [None] * len(runners)
    for index in order:
        step_ms[index] = runners[index].step(batch, world_size)
    return step_ms


def enough(rounds: int, elapsed_s: float, seconds: float) -> bool:
    """Whether to stop: the time is used up, and there are enough rounds for a meaningful median."""
    return rounds >= MIN_ROUNDS and (elapsed_s >= seconds or rounds >= MAX_ROUNDS)


def rounds_to_go(rounds: int, elapsed_s: float, seconds: float, decisions: int) -> int:
    """The number of rounds until rank 0 decides again, which it does about `decisions` times; 0 to stop."""
    if enough(rounds, elapsed_s, seconds):
        return 0
    affordable = int(rounds / max(elapsed_s, 1e-9) * seconds / decisions)
    return min(max(affordable, 1), MAX_ROUNDS - rounds)


def agreed(number: int, device: str = "cpu") -> int:
    shared = torch.tensor([number], device=device)
    dist.broadcast(shared, src=0)
    return int(shared.item())


def gathered(value: object) -> list[Any]:
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, value)
    return by_rank


def warm_up(runners: Sequence[Steps], batch: object, job: Job, report: Report | None = None) -> None:
    """Collective: run steps until all variants are in a steady state. Slow ones report, so as not to look stalled."""
    order = list(range(len(runners)))
    start_s = time.monotonic()
    for done in range(1, FULL_WARMUP_STEPS + 1):
        one_round(runners, batch, order, job.world_size)
        if report is not None:
            report(0.0, job.seconds)
        if agreed(done >= MIN_WARMUP_STEPS and time.monotonic() - start_s > 0.2 * job.seconds, job.control_device):
            break


@contextmanager
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def timed_rounds(
    runners: Sequence[Steps], batch: object, job: Job, report: Report, decisions: int = MAX_ROUNDS
) -> np.ndarray:
    """This rank's step times, [variant, round]. Rank 0 decides about `decisions` times whether to go on."""
    # A new order each round, the same on every rank, so that no variant always follows the same other one.
    shuffler = random.Random(job.seed)
    order = list(range(len(runners)))
    rounds: list[list[Any]] = []
    with no_collections():
        start_s, wanted = time.monotonic(), 1
        while wanted:
            for _ in range(wanted):
                shuffler.shuffle(order)
                rounds.append(one_round(runners, batch, order, job.world_size))
            gc.collect(0)  # only these rounds' objects
            elapsed_s = time.monotonic() - start_s
            report(elapsed_s, max(job.seconds, elapsed_s))
            wanted = agreed(rounds_to_go(len(rounds), elapsed_s, job.seconds, decisions), job.control_device)
    return np.array(rounds).T


def time_model(job: Job, model_name: str, report: Report, kind: type[Runner] = Runner) -> dict[str, Any]:
    """Check all variants' gradients and time their steps, interleaved. Returns the same dict on every rank."""
    return time_runners(job, model_name, build_runners(job, model_name, kind), report)


def time_runners(job: Job, model_name: str, runners: Sequence[Runner], report: Report) -> dict[str, Any]:
    # Another batch for the checks, so that stale gradients don't pass them.
    batch, other_batch = (make_batch(model_name, job.seed, dist.get_rank(), index) for index in (0, 1))
    warm_up(runners, batch, job)
    check_gradients(job, model_name, runners, other_batch)
    samples = timed_rounds(runners, batch, job, report)
    check_gradients(job, model_name, runners, other_batch)
    return {**describe_model(model_name, runners[0].module, job.seed), "step_ms": over_ranks(samples)}


def over_ranks(times_ms: np.ndarray) -> np.ndarray:
    """Collective: the slowest rank's times, because a step takes as long as its slowest rank."""
    slowest: np.ndarray = np.max(gathered(times_ms), axis=0)
    return slowest
