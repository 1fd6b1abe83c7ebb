"""The loop over the microbatches of a step."""

from __future__ import annotations

import warnings
from collections.abc import Generator

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from torchddp.ddp.sync_strategy import DDPSyncStrategy
from torchddp.sync.context import checked_strategy, sync_context, unreduced, unwrapped


def accumulate(
    model: torch.nn.Module, steps: int, strategy: DDPSyncStrategy | str | None = None
) -> Generator[int, None, None]:
    """The microbatches of one step of the optimizer, numbered from 0; the loop's body is in `sync_context`.

        for i in accumulate(model, 4):
            (loss_of(model(microbatches[i])) / 4).backward()
        optimizer.step()

    When the loop has ended, gradients are sums over the microbatches and averages over the ranks. A loop that is left
    early (``break``, ``return``, an exception) reduces nothing more, warns if gradients are left unreduced by that, and
    does not leave the model under ``no_sync()``.

    Args:
        model: as for `sync_context`.
        steps: how many microbatches. Every rank must give the same number.
        strategy: None: the model's own (its argument ``sync=``).

    Collective where gradients are reduced: see `sync_context`, whose errors it raises too.

    Raises:
        TypeError, ValueError: ``steps`` is no integer, or less than 1.
    """
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"steps must be an integer, the number of microbatches, got {steps!r}")
    if steps < 1:
        raise ValueError(f"steps must be 1 or more microbatches, got {steps}")
    return _microbatches(model, steps, checked_strategy(unwrapped(model), strategy))


def _microbatches(model: torch.nn.Module, steps: int, strategy: DDPSyncStrategy) -> Generator[int, None, None]:
    for index in range(steps):
        try:
            with sync_context(model, index == steps - 1, strategy):
                yield index
        except GeneratorExit:
            _warn_if_unreduced(unwrapped(model), index, steps, strategy)
            raise


def _warn_if_unreduced(model: torch.nn.Module, index: int, steps: int, strategy: DDPSyncStrategy) -> None:
    if not isinstance(model, TorchDDP) or not model.require_backward_grad_sync:
        return
    if strategy is DDPSyncStrategy.MULTI_AUTO_SYNC:
        return
    if strategy is DDPSyncStrategy.SINGLE_AUTO_SYNC and index == steps - 1 and unreduced(model) is None:
        return
    warnings.warn(
        f"A loop over accumulate() was left in microbatch {index} of 0 to {steps - 1}: with {strategy.name}, gradients "
        "are not reduced, and differ between ranks. Clear them before the next step.",
        stacklevel=3,
    )
