"""Weights gradients in Accelerate's loop by samples or tokens."""

from __future__ import annotations

import warnings

import accelerate
import torch

from torchddp.ddp.weights import LossKind
from torchddp.integrations import weighing

_HOW = "pass the model that prepare() returned, and call torchddp.install() before it"


def weigh(
    accelerator: accelerate.Accelerator,
    model: torch.nn.Module,
    weight: float | torch.Tensor,
    *,
    loss: LossKind = "mean",
) -> None:
    """Set the weight of the next ``accelerator.backward()``: :meth:`torchddp.DistributedDataParallel.weigh`.

        with accelerator.accumulate(model):
            weigh(accelerator, model, tokens)
            accelerator.backward(mean_loss_of(model(batch)))

    ``backward`` divides the loss by ``gradient_accumulation_steps``, even in a last step with fewer microbatches. This
    compensates for that, so gradients become the mean over all samples or tokens of a step. Call it before each
    backward, on every rank; not collective. A single process has no wrapper: one microbatch per step is correct as it
    is, and with more, a warning says that they count equally.

    Args:
        model: what ``prepare()`` returned.
        weight, loss: how many samples or tokens the loss is the "mean" or the "sum" of.

    Raises:
        TypeError, ValueError: an invalid weight.
        RuntimeError: the model is not wrapped in torchddp's class, or ``sync_each_batch`` with accumulation.
    """
    divided_by = accelerator.gradient_accumulation_steps
    wrapper = weighing.wrapper_of(model, accelerator.num_processes == 1, _HOW)
    if wrapper is None:
        if divided_by > 1:
            warnings.warn(
                "in a single process the model is not wrapped, so nothing is weighted: microbatches of a step count "
                "equally, however many samples or tokens they have",
                stacklevel=2,
            )
        return
    if divided_by > 1 and accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
        raise RuntimeError(
            "weigh() can't be used with sync_each_batch=True, which reduces gradients in the middle of a step and "
            "hides where it begins. Leave sync_each_batch out, or loop over torchddp.sync.accumulate(weights=...)"
        )
    weighing.weigh(wrapper, weight, loss, divided_by=divided_by)
