"""Checks that all variants train alike. Worker side, collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.sharded.trainer import Trainer

# Relative to a parameter's change by training. AdamW's steps depend on a gradient's sign but little on its size, so
# where a gradient is only rounding noise (as for key biases in attention), different rounding gives different steps:
# 1.4e-3 after four GPT steps between plain and fused AdamW on two ranks. Unrequested clipping gives 6e-3 after three,
# so the tolerance must stay below that; a wrong average gives errors near one.
TOLERANCE = 5e-3


def first_problem(attempt: Callable[[], object]) -> str | None:
    """The error of the first rank that had one; None on all ranks if none had. Collective."""
    mine: str | None = None
    try:
        attempt()
    except Exception as error:  # a peer may raise anything
        mine = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    by_rank: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, mine)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(by_rank) if text is not None), None)


def error_of(got: Sequence[Tensor], want: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """The largest error of a parameter relative to its change by training (in norms); nan counts as infinite."""
    worst = 0.0
    for mine, reference, first in zip(got, want, start, strict=True):
        change = float(torch.linalg.vector_norm(reference - first))
        error = float(torch.linalg.vector_norm(mine - reference)) / max(change, 1e-12)
        worst = max(worst, error if error == error else float("inf"))
    return worst


def training_error(trainer: Trainer, want: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """`error_of` the trainer's parameters on the worst rank. Collective."""
    by_rank: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(by_rank, error_of(trainer.full_parameters(), want, start))
    return max(by_rank)
