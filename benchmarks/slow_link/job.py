"""What one launch trains. Pure, imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

RATE = "100mbit"
RANKS_PER_HOST = 2
STEPS = 60
# Steps of one method in a row; the loss is looked at after each slice.
SLICE_STEPS = 5
# Of local methods: one slice.
SYNC_EVERY = 10
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
    sync_every: int = SYNC_EVERY
    case: str = "slow_link"
    backend: str = "gloo"
    collective_timeout_s: float = 240.0
