"""What `DistributedDataParallel(decoupled=True)` goes without, and what it tells an optimizer that updates later."""

from __future__ import annotations

from typing import Protocol

import torch

from torchddp import bucket_sizes

NO_HOOKS = (
    "a DistributedDataParallel with decoupled=True takes no communication hook: hooks reduce a bucket as a whole. "
    "Wrap with decoupled=False to use one."
)
NO_JOIN = (
    "a DistributedDataParallel with decoupled=True can't be used with join(): a rank that has run out of inputs takes "
    "no part in the second half of a reduction. Give all ranks the same number of batches."
)
NO_PLANNING = (
    "bucket_cap_mb='auto' and replan() measure whole reductions: with decoupled=True give a number of MiB, or None"
)


class DeferredUpdates(Protocol):
    """Updates of parameters that wait for gradients; see `torchddp.optim.DeferredOptimizer`."""

    def before_forward(self) -> None:
        """The model is about to run."""

    def synchronize(self) -> None:
        """Until all gradients are final and all updates applied. Raises TransportError."""

    def drop(self) -> None:
        """Forgets what has not been applied."""


def check_options(bucket_cap_mb: float | str | None, wire_dtype: torch.dtype | None) -> None:
    """ValueError for what does not go with ``decoupled=True``."""
    if bucket_cap_mb == bucket_sizes.AUTO:
        raise ValueError(NO_PLANNING)
    if wire_dtype is not None:
        raise ValueError(f"wire_dtype={wire_dtype} does not go with decoupled=True, which sends gradients as they are")
