"""The weights of the transformers Trainer's microbatches, and the loss that it logs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import accelerate
import torch
from accelerate.utils import find_batch_size

from torchddp.integrations import weighing
from torchddp.integrations.accelerate.weights import HOW, UNWEIGHED

_IGNORED = -100  # the label that losses ignore
_FOLD_STEPS = 256  # steps whose losses are kept before ranks sum them, if nothing is logged earlier


def count_items(inputs: Mapping[str, Any], *, shifts_labels: bool) -> int | torch.Tensor:
    """The number of labels that a microbatch's loss covers; without labels, the number of samples."""
    if "shift_labels" in inputs:
        labels = inputs["shift_labels"]
    elif "labels" in inputs:
        labels = inputs["labels"][..., 1:] if shifts_labels else inputs["labels"]
    else:
        return int(find_batch_size(inputs))
    found: torch.Tensor = labels.ne(_IGNORED).sum()
    return found


class TokenWeights:
    """The weights of a step's microbatches, in order."""

    def __init__(self, weights_and_counts: Sequence[tuple[float, float]]) -> None:
        self._coming = list(weights_and_counts)
        self._begun = False

    @classmethod
    def of_sums(cls, items: Any, microbatches: int) -> TokenWeights:
        """For losses that are sums over a microbatch, divided by the ``items`` of this rank in the whole step."""
        n = float(items)
        return cls([(n, n if index == 0 else 0.0) for index in range(microbatches)])

    @classmethod
    def of_means(cls, items: Sequence[Any], divided_by: int) -> TokenWeights:
        """For losses that are means over the ``items`` of a microbatch, then divided by ``divided_by``."""
        return cls([(float(n) * divided_by, float(n)) for n in items])

    @property
    def count(self) -> float:
        """The sum of the counts of the remaining microbatches."""
        return sum(count for _, count in self._coming)

    def weigh(self, model: torch.nn.Module, accelerator: accelerate.Accelerator) -> float:
        """Set the weight of the next microbatch's backward, and return it."""
        if not self._coming:
            raise RuntimeError(
                "weighted=True: training_step() got a microbatch that get_batch_samples() has not counted. If you "
                "override get_batch_samples(), call the trainer's own"
            )
        weight, count = self._coming.pop(0)
        each_is_reduced = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        goes_on, self._begun = each_is_reduced and self._begun, True
        wrapper = weighing.wrapper_of(model, accelerator.num_processes == 1, HOW)
        if wrapper is not None:
            # backward() divides by these steps: 1, unless another Accelerator in the process has changed them.
            wrapper.session.weigh(weight * accelerator.gradient_accumulation_steps, count, goes_on=goes_on)
        elif len({weight for weight, _ in (*self._coming, (weight, count))}) > 1:
            warnings.warn(UNWEIGHED, stacklevel=3)
        return weight


class StepLosses:
    """The weighted means of the loss over all ranks, of the steps since the last log.

    Ranks sum them when something is logged, not in each step. ``add_up``: sums a tensor over the ranks.
    """

    def __init__(self, add_up: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        self._add_up, self._device = add_up, device
        self._steps: list[tuple[torch.Tensor, float]] = []  # weights times losses of this rank, and its count
        self._total = 0.0  # of the steps before them

    def begin(self, count: float) -> None:
        """Begin a step. Collective in some steps, the same ones on all ranks."""
        if len(self._steps) == _FOLD_STEPS:
            self._fold()
        self._steps.append((torch.zeros((), dtype=torch.float64, device=self._device), count))

    def add(self, loss: torch.Tensor, weight: float) -> None:
        if weight > 0:  # otherwise it may be NaN
            self._steps[-1][0].add_(loss.to(torch.float64), alpha=weight)

    def take(self) -> float:
        """Return the sum over the steps, and reset it. Collective."""
        self._fold()
        total, self._total = self._total, 0.0
        return total

    def _fold(self) -> None:
        if not self._steps:
            return
        sums = torch.stack([loss for loss, _ in self._steps])
        counts = torch.tensor([count for _, count in self._steps], dtype=torch.float64, device=self._device)
        self._steps.clear()
        sums, counts = self._add_up(torch.stack((sums, counts)))
        self._total += float(torch.where(counts > 0, sums / counts, 0.0).sum())
