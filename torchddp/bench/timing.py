"""Worker side of a timed case: build the variants, check their gradients, time them step by step."""

from __future__ import annotations

import copy
import gc
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
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
from torchddp.harness.stats import slowest_rank
from torchddp.harness.variants import Role, Variant, load_class

# static_graph records in step 1 and rebuilds buckets in step 2, so nothing is steady before the third.
MIN_WARMUP_STEPS = 3
# torch DDP times itself in its first ten steps; cheap models can afford to leave these out.
FULL_WARMUP_STEPS = 12
RELATIVE_TOLERANCE = 1e-4
# Time for the message with the starting time to reach every rank.
START_DELAY_NS = 1_000_000


class WrongGradientsError(RuntimeError):
    """A variant computed other gradients than the rest, so its time means nothing."""


def start_together(world_size: int) -> None:
    """Return on all ranks of this machine within some microseconds; collective.

    The ranks leave gloo's barrier up to half a millisecond apart, and whoever leaves it first would wait that long at
    the end of its step: charged to the wrapper, though no wrapper made it.
    """
    if world_size == 1:
        return
    dist.barrier()
    if world_size > len(os.sched_getaffinity(0)):
        # They can't all run at once, and busy waiting would only keep others from running.
        return
    # CLOCK_MONOTONIC, which the processes of a machine share.
    start_ns = torch.tensor([time.perf_counter_ns() + START_DELAY_NS])
    dist.broadcast(start_ns, src=0)
    agreed_ns = int(start_ns.item())
    while time.perf_counter_ns() < agreed_ns:
        pass


class Steps(Protocol):
    """What can be timed."""

    def step(self, batch: Any, world_size: int = 1) -> Any:
        """One step; its time, or its times, in ms."""


class AnyRunner(Steps, Protocol):
    """A variant that is built and ready to step: forward and backward."""

    variant: Variant

    def gradients(self) -> list[tuple[str, Tensor]]:
        """Gradients by the name of their parameter in the bare model."""


@dataclass
class Runner:
    """A variant that is built and ready to step."""

    variant: Variant
    module: nn.Module
    # Of the module's output.
    loss: Callable[[Any], Tensor] = output_is_loss

    def step(self, batch: Any, world_size: int = 1) -> float:
        """One forward and backward, begun by `world_size` ranks at once; its wall time in ms."""
        # Outside the timed part, the same for every variant: what it costs is the optimizer's, not the wrapper's.
        self.module.zero_grad(set_to_none=True)
        start_together(world_size)
        start_ns = time.perf_counter_ns()
        self.loss(run_forward(self.module, batch)).backward()
        return (time.perf_counter_ns() - start_ns) / 1e6

    def gradients(self) -> list[tuple[str, Tensor]]:
        return gradients_of(self.variant, self.module)


def gradients_of(variant: Variant, module: nn.Module) -> list[tuple[str, Tensor]]:
    """Gradients by the name of their parameter in the bare model, which a variant may have wrapped; zeros for a
    parameter that no rank has used."""
    bare = module if variant.class_path is None else module.module
    parameters = [(name, p) for name, p in bare.named_parameters() if p.requires_grad]  # type: ignore[union-attr]
    return [(name, torch.zeros_like(p) if p.grad is None else p.grad) for name, p in parameters]


def wrap_copies(
    original: nn.Module, variants: Sequence[Variant], build: Callable[[type, nn.Module, dict[str, Any]], nn.Module]
) -> list[nn.Module]:
    """A copy of the model per variant, wrapped by `build(class, copy, options)` where the variant has a class."""
    modules = []
    for variant in variants:
        module = copy.deepcopy(original)
        # No step changes a weight, so the copies share theirs: less memory, and the same cache misses for everyone.
        for mine, shared in zip(module.parameters(), original.parameters(), strict=True):
            mine.data = shared.data
        if variant.class_path is not None:
            module = build(load_class(variant.class_path), module, variant.keywords)
        modules.append(module)
    return modules


def loss_of(job: Job, model_name: str) -> Callable[[Any], Tensor]:
    """The model's loss; weighted by rank where batches are equal, so that gradients must really be averaged."""
    spec = find_model(model_name, job.seed)
    if spec.batches_differ:
        return spec.loss
    weight = 1 + dist.get_rank()
    return lambda output: weight * spec.loss(output)


def build_runners(job: Job, model_name: str, kind: type[Runner] = Runner) -> list[Runner]:
    """One wrapper per variant over copies of one model, all in this process group."""
    original = make_model(model_name, job.seed)
    modules = wrap_copies(original, job.variants, lambda cls, module, options: cls(module, **options))
    loss = loss_of(job, model_name)
    return [kind(variant, module, loss) for variant, module in zip(job.variants, modules, strict=True)]


def two_batches(job: Job, model_name: str) -> list[Any]:
    """This rank's to be timed, and another for the checks, so that a gradient left over from a step is seen."""
    return [make_batch(model_name, job.seed, dist.get_rank(), index) for index in (0, 1)]


def check_gradients(
    job: Job, model_name: str, runners: Sequence[AnyRunner], batch: Any, tolerance: float = RELATIVE_TOLERANCE
) -> None:
    """Every variant against the mean over ranks of the bare model's gradients, computed without any wrapper."""
    local = next(runner for runner in runners if runner.variant.role is Role.LOCAL)
    _same_step(local, batch, job)
    mine = local.gradients()
    # Summed as one tensor: a thousand small reductions take seconds where the ranks share few cores.
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


def _same_step(runner: AnyRunner, batch: Any, job: Job) -> None:
    # With dropout, two steps are alike only when they draw the same numbers.
    torch.manual_seed(job.seed)
    runner.step(batch)


def _compare(variant: Variant, model_name: str, name: str, want: Tensor, got: Tensor | None, tolerance: float) -> None:
    where = f"'{variant.name}' on model '{model_name}', rank {dist.get_rank()}, parameter '{name}'"
    if got is None:
        raise WrongGradientsError(f"{where}: no gradient")
    scale = float(want.abs().max())
    error = float((want - got).abs().max())
    # `not <=` also catches nan.
    if got.shape != want.shape or not error <= tolerance * scale + 1e-12:
        raise WrongGradientsError(f"{where}: off by {error:.3g} where the largest gradient is {scale:.3g}")


def one_round(runners: Sequence[Steps], batch: Any, order: list[int], world_size: int) -> list[Any]:
    """One step of every variant in the given order; what the steps return, by variant."""
    step_ms: list[Any] = [None] * len(runners)
    for index in order:
        step_ms[index] = runners[index].step(batch, world_size)
    return step_ms


def enough(rounds: int, elapsed_s: float, seconds: float) -> bool:
    """Whether the time budget is spent, and not before a median means something."""
    return rounds >= MIN_ROUNDS and (elapsed_s >= seconds or rounds >= MAX_ROUNDS)


def agreed(number: int, device: str = "cpu") -> int:
    """Rank 0's number, on every rank."""
    shared = torch.tensor([number], device=device)
    dist.broadcast(shared, src=0)
    return int(shared.item())


def warm_up(runners: Sequence[Steps], batch: Any, job: Job) -> None:
    """Steps until nothing is a first time any more."""
    order = list(range(len(runners)))
    start_s = time.monotonic()
    for done in range(1, FULL_WARMUP_STEPS + 1):
        one_round(runners, batch, order, job.world_size)
        if agreed(done >= MIN_WARMUP_STEPS and time.monotonic() - start_s > 0.2 * job.seconds, job.control_device):
            break


@contextmanager
def no_collections() -> Iterator[None]:
    """No collection of garbage falls into what is timed."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def timed_rounds(runners: Sequence[Steps], batch: Any, job: Job, report: Report) -> np.ndarray:
    """[variant, round] of step times in ms on this rank; [clock, variant, round] where a step has several times."""
    # The same shuffle on every rank, another one each round: no variant always runs in the wake of the same one.
    shuffler = random.Random(job.seed)
    order = list(range(len(runners)))
    rounds: list[list[float]] = []
    with no_collections():
        start_s, finished = time.monotonic(), False
        while not finished:
            shuffler.shuffle(order)
            rounds.append(one_round(runners, batch, order, job.world_size))
            gc.collect(0)  # only what this round made
            elapsed_s = time.monotonic() - start_s
            report(elapsed_s, max(job.seconds, elapsed_s))
            finished = bool(agreed(enough(len(rounds), elapsed_s, job.seconds), job.control_device))
    return np.array(rounds).T


def time_model(job: Job, model_name: str, report: Report) -> dict[str, Any]:
    """Step times of all variants, interleaved, after their gradients proved equal. The same dict on every rank."""
    return time_runners(job, model_name, build_runners(job, model_name), report)


def time_runners(job: Job, model_name: str, runners: Sequence[Runner], report: Report) -> dict[str, Any]:
    """`time_model` for variants that are built already, and stay with the caller."""
    batch, other_batch = two_batches(job, model_name)
    warm_up(runners, batch, job)
    check_gradients(job, model_name, runners, other_batch)
    samples = timed_rounds(runners, batch, job, report)
    check_gradients(job, model_name, runners, other_batch)
    return {**describe_model(model_name, runners[0].module, job.seed), "step_ms": over_ranks(samples, job)}


def over_ranks(times_ms: np.ndarray, job: Job) -> np.ndarray:
    """[variant, round] of times of this rank -> of the slowest rank; collective."""
    by_rank: list[Any] = [None] * job.world_size
    dist.all_gather_object(by_rank, times_ms)
    return slowest_rank(np.stack(by_rank))
