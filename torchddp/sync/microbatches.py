"""Microbatches of a step: the loop over them, and Composer's functions for a module and for each microbatch."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Generator, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from torchddp.composable.module import sole_engine
from torchddp.ddp.model import local_of, reason_against_reducing
from torchddp.ddp.module import DistributedDataParallel
from torchddp.ddp.options import DDPSyncStrategy, SyncChoice
from torchddp.ddp.weights import weight_and_count

# Models of which a step has begun with a microbatch that reduces nothing.
_in_a_step: weakref.WeakSet[TorchDDP] = weakref.WeakSet()


def prepare_ddp_module(
    module: torch.nn.Module, find_unused_parameters: bool = False, **options: Any
) -> torch.nn.Module:
    """Composer's function of this name: DistributedDataParallel, or the module itself if no parameter requires grad.

    Collective. ``options`` are further arguments of torchddp's class. RuntimeError without a process group; also what
    the class raises.
    """
    if not dist.is_initialized():
        raise RuntimeError("prepare_ddp_module() needs a process group: call init_process_group() first")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    return DistributedDataParallel(module, find_unused_parameters=find_unused_parameters, **options)


def accumulate(
    model: torch.nn.Module,
    steps: int,
    strategy: DDPSyncStrategy | SyncChoice | None = None,
    *,
    weights: Sequence[float | torch.Tensor] | None = None,
) -> Generator[int, None, None]:
    """Iterate over the microbatches of one optimizer step, numbered from 0; the loop body runs in `sync_context`.

    Example:

        for i in torchddp.sync.accumulate(model, len(microbatches)):
            (loss_of(model(microbatches[i])) / len(microbatches)).backward()
        optimizer.step()

    After the loop, gradients are summed over the microbatches and averaged over the ranks. If the loop is left early
    (``break``, an exception), nothing more is reduced, but for FORCED_SYNC's last microbatch; it warns about unreduced
    gradients and ends its ``no_sync()``.

    Args:
        model: as for `sync_context`.
        steps: the number of microbatches, the same on every rank.
        strategy: None: the model's own (its argument ``sync=``).
        weights: the number of samples or tokens in each microbatch of this rank. Gradients become the mean over all of
            them on all ranks (:meth:`torchddp.DistributedDataParallel.weigh`). The loss of a microbatch is then the
            mean over its own samples, and is not divided by ``steps``.

    Collective where gradients are reduced: see `sync_context`, whose errors it raises too.

    Raises:
        TypeError, ValueError: ``steps`` is not an integer of at least 1; weights are invalid, or not one for each.
        RuntimeError: weights for a model that is neither a torchddp.DistributedDataParallel nor replicated.
    """
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"steps must be an integer, the number of microbatches, got {steps!r:.80}")
    if steps < 1:
        raise ValueError(f"steps must be 1 or more microbatches, got {steps}")
    chosen = checked_strategy(unwrapped(model), strategy)
    return _microbatches(model, steps, chosen, _checked_weights(unwrapped(model), steps, chosen, weights))


def _checked_weights(
    model: torch.nn.Module, steps: int, strategy: DDPSyncStrategy, weights: Sequence[float | torch.Tensor] | None
) -> list[tuple[float, float]] | None:
    if weights is None:
        return None
    if not isinstance(weights, Sized):
        raise TypeError(f"weights must be a list with a number for each microbatch, got {weights!r}")
    if len(weights) != steps:
        raise ValueError(f"there must be a weight for each of the {steps} microbatches, got {len(weights)}")
    if not isinstance(model, DistributedDataParallel):
        raise RuntimeError(
            f"weights= needs a torchddp.DistributedDataParallel or a replicated module, got {torch.typename(model)}"
        )
    if strategy is DDPSyncStrategy.MULTI_AUTO_SYNC and model.session.has_owners:
        raise RuntimeError("weights= with MULTI_AUTO_SYNC needs all averages on every rank: use SINGLE_AUTO_SYNC")
    return [weight_and_count(weight, "mean", model.session.rank) for weight in weights]


def _microbatches(
    model: torch.nn.Module, steps: int, strategy: DDPSyncStrategy, weights: list[tuple[float, float]] | None
) -> Generator[int, None, None]:
    for index in range(steps):
        if weights is not None:
            once = strategy is not DDPSyncStrategy.MULTI_AUTO_SYNC
            wrapper = cast(DistributedDataParallel, unwrapped(model))
            wrapper._weigh(*weights[index], begins=once or index == 0, ends=once or index == steps - 1)
        try:
            with sync_context(model, index == steps - 1, strategy):
                yield index
        except GeneratorExit:
            _warn_if_unreduced(unwrapped(model), index, steps, strategy)
            raise


def _warn_if_unreduced(model: torch.nn.Module, index: int, steps: int, strategy: DDPSyncStrategy) -> None:
    reduces_once = strategy is not DDPSyncStrategy.MULTI_AUTO_SYNC
    if not (reduces_once and isinstance(model, TorchDDP) and model.require_backward_grad_sync):
        return
    if index == steps - 1 and (strategy is DDPSyncStrategy.FORCED_SYNC or unreduced(model) is None):
        return
    warnings.warn(
        f"A loop over accumulate() ended early, in microbatch {index} (of 0 to {steps - 1}). With {strategy.name}, "
        "this step's gradients are not reduced and differ between ranks. Clear them before the next step.",
        stacklevel=3,
    )


@contextmanager
def sync_context(
    model: torch.nn.Module, is_final_microbatch: bool, strategy: DDPSyncStrategy | SyncChoice | None = None
) -> Iterator[None]:
    """Context for the forward and backward of one microbatch; gradients are reduced when the strategy asks for it.

    Example:

        for i, microbatch in enumerate(microbatches):
            with torchddp.sync.sync_context(model, i == len(microbatches) - 1, "forced_sync"):
                loss_of(model(microbatch)).backward()

    Composer's ``ddp_sync_context``, for a model instead of its State: torchddp's or torch's DistributedDataParallel, a
    replicated module, or any other module (which is left alone, as is one with several replicated modules inside),
    compiled or not. An outer ``no_sync()`` takes precedence. If the body raises, FORCED_SYNC still reduces, as the
    other ranks do; the other strategies reduce nothing more.

    Args:
        is_final_microbatch: whether it is the last of the step; the same on every rank.
        strategy: None: the model's own (its argument ``sync=``).

    Collective where gradients are reduced: in backward, and with FORCED_SYNC on leaving the final microbatch.

    Raises:
        ValueError: an unknown strategy.
        RuntimeError: FORCED_SYNC for torch's own class or in a mode that excludes it; the backward of the last
            microbatch left gradients unreduced (names their parameters).
        TransportError: a peer died or did not arrive in time.
    """
    wrapper = unwrapped(model)
    chosen = checked_strategy(wrapper, strategy)
    if not isinstance(wrapper, TorchDDP) or not wrapper.require_backward_grad_sync:
        yield
    elif chosen is DDPSyncStrategy.FORCED_SYNC:
        try:
            with wrapper.no_sync():
                yield
        finally:
            if is_final_microbatch and isinstance(wrapper, DistributedDataParallel):
                wrapper.reduce()
    elif chosen is DDPSyncStrategy.SINGLE_AUTO_SYNC and not is_final_microbatch:
        _in_a_step.add(wrapper)
        with wrapper.no_sync():
            yield
    else:
        finished_before = _finished_reductions(wrapper)
        yield
        if is_final_microbatch and _finished_reductions(wrapper) == finished_before:
            _check_reduced(wrapper, chosen)
        _in_a_step.discard(wrapper)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module passed to ``torch.compile``, if this is its result; for a replicated module, its engine."""
    original = getattr(model, "_orig_mod", model)
    module = original if isinstance(original, torch.nn.Module) else model
    return sole_engine(module) or module


def checked_strategy(model: torch.nn.Module, asked_for: DDPSyncStrategy | str | None) -> DDPSyncStrategy:
    """The requested strategy, or the model's own. ValueError, or RuntimeError if the model does not support it."""
    if asked_for is None and isinstance(model, DistributedDataParallel):
        strategy = model.sync_strategy
    else:
        strategy = DDPSyncStrategy._choose(asked_for, getattr(model, "find_unused_parameters", False))
    if strategy is DDPSyncStrategy.FORCED_SYNC and isinstance(model, TorchDDP):
        if not isinstance(model, DistributedDataParallel):
            kind = torch.typename(model)
            raise RuntimeError(f"FORCED_SYNC needs a torchddp.DistributedDataParallel, got {kind}: use MULTI_AUTO_SYNC")
        model._check_can_reduce()
    return strategy


def unreduced(model: TorchDDP) -> RuntimeError | None:
    """The error of a synchronized forward whose backward did not complete, if there was one."""
    try:
        model._check_reducer_finalized()
    except RuntimeError as error:
        return error
    return None


def _has_unreduced(model: TorchDDP) -> bool:
    """Whether there are gradients of earlier microbatches."""
    if not isinstance(model, DistributedDataParallel) or model not in _in_a_step or model.reducer.is_in_graph:
        return False
    if reason_against_reducing(model) or model.session.is_joining:  # reductions that the reducer doesn't count
        return False
    trained = (p for p in model.parameters() if p.requires_grad)
    grads = [getattr(p, "main_grad", None) if p.grad is None else local_of(p.grad) for p in trained]
    return any(grad is not None and (grad.is_sparse or bool(grad.any())) for grad in grads)


def _finished_reductions(model: TorchDDP) -> int | None:
    return model.reducer.stats()["finished"] if isinstance(model, DistributedDataParallel) else None


def _check_reduced(model: TorchDDP, strategy: DDPSyncStrategy) -> None:
    """The last microbatch reduced nothing, so the next optimizer step would use local gradients, if there are any."""
    error = unreduced(model)
    if error is None and not _has_unreduced(model):
        return
    if error is None or (isinstance(model, DistributedDataParallel) and not model.reducer.grad_ready_order()):
        if strategy is DDPSyncStrategy.SINGLE_AUTO_SYNC:
            warnings.warn(
                "The last microbatch of a step with SINGLE_AUTO_SYNC ended without a backward that reached parameters. "
                "Gradients of the other microbatches are not reduced, and differ between ranks. Clear them, or use "
                "FORCED_SYNC, which reduces whatever gradients there are.",
                stacklevel=4,
            )
        return
    raise RuntimeError(
        f"the last microbatch of a step with {strategy.name} ended without reducing gradients. Parameters "
        "that only other microbatches use need find_unused_parameters=True, or FORCED_SYNC, which reduces whatever "
        f"gradients there are. {error}"
    ) from error
