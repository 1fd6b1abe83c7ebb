"""Accelerate on torchddp's engine, after ``torchddp.install()``: options, and weighted means (docs/integrations.md)."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch

from torchddp import comm_hooks
from torchddp.ddp.former_names import current
from torchddp.ddp.module import OPTIONS, DistributedDataParallel, options_of
from torchddp.ddp.weights import LossKind
from torchddp.integrations import keyword_options, require, weighing
from torchddp.integrations.install import installed

require("accelerate", "accelerate")

import accelerate  # noqa: E402
from accelerate.utils import DistributedDataParallelKwargs  # noqa: E402

__all__ = ["TorchDDPKwargs", "weigh"]

_HOW = "pass the model that prepare() returned, and call torchddp.install() before it"
_OF_ACCELERATE = dict.fromkeys(("device_ids", "output_device"), "the device that Accelerate chooses")


class TorchDDPKwargs(DistributedDataParallelKwargs):
    """The arguments of :class:`torchddp.DistributedDataParallel`, as a kwargs handler of Accelerate.

        torchddp.install()
        accelerator = accelerate.Accelerator(kwargs_handlers=[TorchDDPKwargs(comm_hook="bf16")])

    It takes the place of Accelerate's ``DistributedDataParallelKwargs``, whose ``comm_hook`` is one of torch's.

    Args:
        options: any argument of the class except the module and those that Accelerate sets (``device_ids``,
            ``output_device``). They take precedence over those of `install`.

    Raises:
        TypeError: an unknown option, or a ``comm_hook`` that is not a hook.
        ValueError: a value that is not allowed.
        RuntimeError: in ``prepare()``, torchddp is not installed.
    """

    def __init__(self, **options: Any) -> None:
        known = [name for name in OPTIONS if name not in _OF_ACCELERATE]
        options = current(options, known, "TorchDDPKwargs", _OF_ACCELERATE)
        options_of(**options)  # checks the values
        if options.get("comm_hook") is not None:
            comm_hooks.resolve(options["comm_hook"])
        super().__init__()
        self._options: dict[str, object] = options

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        kind: type = DistributedDataParallelKwargs
        return kind  # Accelerate looks handlers up by their exact class

    def to_kwargs(self) -> dict[str, object]:
        """Accelerate passes these to torch's class."""
        if not installed():
            raise RuntimeError("TorchDDPKwargs has options of torchddp's class: call torchddp.install() first")
        return self._options

    def register_comm_hook(self, model: torch.nn.Module) -> None:
        """Nothing: the class has registered its own."""


# For editors and help().
TorchDDPKwargs.__signature__ = inspect.Signature(keyword_options(DistributedDataParallel, ("module", *_OF_ACCELERATE)))


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
    weighing.weigh(wrapper, weight, loss, divided_by)
