"""What one launch trains. Pure, imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.training.outer_steps import OuterSteps

RATE = "100mbit"
RANKS_PER_HOST = 2
STEPS = 50
# Steps of one method in a row; the loss is looked at after each slice.
SLICE_STEPS = 5
# Local methods have a slice from one outer step to the next.
OUTER_STEPS = OuterSteps(sync_every=10, lr=1.0, momentum=0.0, wire="int8")
# A method that has not come to the loss after this many times the steps of torch DDP is stopped.
PATIENCE = 4
TARGET_METHOD = "torch-ddp"


@dataclass(frozen=True)
class SlowLinkJob:
    """Picklable."""

    methods: tuple[str, ...]
    world_size: int
    ranks_per_host: int
    # Of torch DDP; the loss it has then is everyone's target.
    steps: int = STEPS
    seed: int = 0
    slice_steps: int = SLICE_STEPS
    outer: OuterSteps = OUTER_STEPS
    case: str = "slow_link"
    backend: str = "gloo"
    collective_timeout_s: float = 240.0
