"""The settings of one launch. Pure, imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.training.outer_steps import OuterSteps

WORLD_SIZE = 2
OUTER_STEPS = OuterSteps(sync_every=50, lr=0.9, momentum=0.5, wire="fp32")
# Evaluations per run, not counting the one before the first step.
EVALUATIONS = 12
QUICK_STEPS = {"gpt": 100, "digits": 100}


@dataclass(frozen=True)
class ConvergenceJob:
    """Picklable."""

    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: int
    # A few steps, to check that everything works.
    quick: bool = False
    outer: OuterSteps = OUTER_STEPS
    case: str = "convergence"
    world_size: int = WORLD_SIZE
    backend: str = "gloo"
    collective_timeout_s: float = 120.0


def evaluation_steps(steps: int, sync_every: int) -> tuple[int, ...]:
    """The steps after which the loss is evaluated: evenly spaced, when local methods have just synced, and the last."""
    every = max(1, round(steps / EVALUATIONS / sync_every)) * sync_every
    return (*range(every, steps, every), steps)
