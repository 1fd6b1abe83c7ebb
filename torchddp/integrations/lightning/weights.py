"""Weights gradients in Lightning's loops by samples or tokens."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.fabric.wrappers import _FabricModule

from torchddp import _torch
from torchddp.ddp.weights import LossKind
from torchddp.integrations import weighing
from torchddp.sync.microbatches import unwrapped

_HOW = (
    "use strategy='torchddp' or 'torchddp_sharded', which wrap on a single device too, or torchddp.install() with "
    "Lightning's 'ddp'"
)


@_torch.disable_dynamo(recursive=True)
def weigh(target: torch.nn.Module | pl.Trainer, weight: float | torch.Tensor, *, loss: LossKind = "mean") -> None:
    """Set the weight of the next backward: :meth:`torchddp.DistributedDataParallel.weigh`.

        def training_step(self, batch, index):
            weigh(self, len(batch))
            return mean_loss_of(batch)

    In automatic optimization, Lightning divides the loss by ``accumulate_grad_batches``, and this compensates for that.
    In manual optimization and with Fabric nothing divides it, and your program shouldn't either. Call it before each
    backward, on every rank; not collective.

    Args:
        target: the LightningModule or its Trainer; under Fabric the module that ``fabric.setup()`` returned.
        weight, loss: how many samples or tokens the loss is the "mean" or the "sum" of.

    Raises:
        TypeError: another target, or a weight that is not a number.
        ValueError: a number that can't be a weight.
        RuntimeError: the strategy doesn't use torchddp's class, and the weight would be ignored: on several devices, or
            where microbatches are or may be accumulated. Also for a LightningModule under Fabric.
    """
    model, divided_by, alone = _place(target)
    wrapper = weighing.wrapper_of(model, alone, _HOW)
    if wrapper is not None:
        weighing.weigh(wrapper, weight, loss, divided_by)


def _place(target: torch.nn.Module | pl.Trainer) -> tuple[torch.nn.Module, int, bool]:
    """The wrapped model, the divisor of its loss, and whether it may be unwrapped (one process, no accumulation)."""
    if isinstance(target, torch.nn.Module):
        target = unwrapped(target)
    if isinstance(target, _FabricModule):
        return target._forward_module, 1, False
    if isinstance(target, pl.LightningModule):
        if target._fabric is not None:
            raise RuntimeError(
                f"{type(target).__name__} runs under Fabric: give weigh() the module that fabric.setup() returned, "
                "whose strategy has wrapped it"
            )
        target = target.trainer
    if not isinstance(target, pl.Trainer):
        raise TypeError(
            "weigh() takes a LightningModule of lightning.pytorch, its Trainer, or the module that fabric.setup() "
            f"returned, got {type(target).__name__}"
        )
    model, automatic = target.strategy.model, target.lightning_module.automatic_optimization
    divided_by = target.accumulate_grad_batches if automatic else 1
    return model, divided_by, automatic and divided_by == 1 and target.world_size == 1
