"""What `DistributedDataParallel(decoupled=True)` goes without, and what it tells an optimizer that updates later."""

from __future__ import annotations

import logging
import weakref
from typing import Protocol

import torch

from torchddp import bucket_sizes
from torchddp.errors import TransportError

logger = logging.getLogger("torchddp.distributed")

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
        """Until all gradients are final and all updates applied; after an error nothing is left to apply.

        Raises:
            TransportError: a gather failed.
        """


class Updates:
    """The updates of one model that are made later, as long as their optimizer lives."""

    def __init__(self) -> None:
        self._updates: weakref.ref[DeferredUpdates] | None = None

    def hand_to(self, updates: DeferredUpdates) -> None:
        """From now on by this optimizer alone."""
        self._updates = weakref.ref(updates)

    def are_of(self, updates: DeferredUpdates) -> bool:
        """Whether no other has taken its place."""
        return self._current() is updates

    def before_forward(self) -> None:
        """The model is about to run."""
        if (updates := self._current()) is not None:
            updates.before_forward()

    def apply(self) -> None:
        """All that are pending. Raises TransportError."""
        if (updates := self._current()) is not None:
            updates.synchronize()

    def settle(self) -> None:
        """Before the group changes, of which ranks may be gone: then what is pending is lost."""
        try:
            self.apply()
        except TransportError as error:
            logger.warning("Updates that waited for their gradients were dropped: %s", error)

    def _current(self) -> DeferredUpdates | None:
        return self._updates() if self._updates is not None else None


def check_options(
    bucket_cap_mb: float | str | None, wire_dtype: torch.dtype | None, find_nonfinite: bool | str
) -> None:
    """ValueError for what does not go with ``decoupled=True``."""
    if bucket_cap_mb == bucket_sizes.AUTO:
        raise ValueError(NO_PLANNING)
    if wire_dtype is not None:
        raise ValueError(f"wire_dtype={wire_dtype} does not go with decoupled=True, which sends gradients as they are")
    if find_nonfinite == "raise":
        raise ValueError(
            'find_nonfinite="raise" does not go with decoupled=True, where averages may arrive after backward'
        )
