"""The settings of one launch. Pure, imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.training.outer_steps import OuterSteps

RATE = "100mbit"
RANKS_PER_HOST = 2
STEPS = 50
# Consecutive steps of one method; the loss is evaluated after each slice.
SLICE_STEPS = 5
# For local methods a slice is one outer step.
OUTER_STEPS = OuterSteps(sync_every=10, lr=1.0, momentum=0.0, wire="int8")
# A method that has not reached the loss after this many times torch DDP's steps is stopped.
PATIENCE = 4
TARGET_METHOD = "torch-ddp"


@dataclass(frozen=True)
class SlowLinkJob:
    """Picklable."""

    methods: tuple[str, ...]
    world_size: int
    ranks_per_host: int
    # Steps of torch DDP; its loss then is the target for all methods.
    steps: int = STEPS
    seed: int = 0
    slice_steps: int = SLICE_STEPS
    outer: OuterSteps = OUTER_STEPS
    case: str = "slow_link"
    backend: str = "gloo"
    collective_timeout_s: float = 240.0
