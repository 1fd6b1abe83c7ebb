"""The transformers Trainer, whose models are wrapped in torchddp's class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Trainer

from torchddp.integrations.accelerate.accelerator import adopt
from torchddp.integrations.accelerate.options import TorchDDPKwargs
from torchddp.integrations.accelerate.token_weights import StepLosses, TokenWeights, count_items


class TorchDDPTrainerMixin:
    """Mixin for a trainer class: ``class MyTrainer(TorchDDPTrainerMixin, Seq2SeqTrainer)``.

    Takes the trainer's arguments, and ``ddp_kwargs``: a :class:`TorchDDPKwargs` or a dict of its options. Options that
    are not given come from the ``ddp_*`` fields of TrainingArguments. By default, the trainer looks for unused
    parameters in every step unless the model checkpoints activations; ``ddp_find_unused_parameters=False`` saves that.

    With ``ddp_kwargs={"weighted": True}``, gradients and the logged loss are means over all tokens of a step, over all
    ranks and microbatches and for any kind of model. The trainer's ``average_tokens_across_devices`` then has no effect
    in training. See ``docs/weighted_means.md``.

    Raises:
        TypeError: an unknown option.
        ValueError: the arguments choose FSDP or DeepSpeed; in training, a weighted step without a single token on any
            rank, unless ``ddp_kwargs`` has ``zero_weights="zeros"``.
    """

    # The trainer's.
    accelerator: Any
    args: Any

    def __init__(self, *args: Any, ddp_kwargs: TorchDDPKwargs | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._ddp_kwargs = ddp_kwargs
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the trainer's accelerator, and make it wrap models in torchddp's class."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        adopt(self.accelerator, self._ddp_kwargs)
        self._weighted: bool = self.accelerator.ddp_handler.weighted
        self._token_weights = TokenWeights([])
        self._step_losses = StepLosses(self.accelerator.reduce, self.accelerator.device)

    # --- weighted means ---

    def count_items(self, inputs: Mapping[str, Any]) -> float | torch.Tensor:
        """How many tokens or samples the loss of a microbatch is the mean of. Override it for other losses.

        Called with ``weighted=True`` if the trainer doesn't pass ``num_items_in_batch`` to the model. Counts labels
        that are not -100, for causal language models without the first of each row, which nothing predicts. Without
        labels, counts samples.
        """
        return count_items(inputs, shifts_labels=getattr(self, "_loss_shifts_labels", False))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """The microbatches of a step, and with ``weighted=True`` how many tokens they have on this rank."""
        if not self._weighted:
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        with self._this_rank_only():
            batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        self._token_weights = self._weights_of(batches, items)
        self._step_losses.begin(self._token_weights.count)
        return batches, items

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of a microbatch, and with ``weighted=True`` its weight before. Returns the loss."""
        if not self._weighted:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        weight = self._token_weights.weigh(model, self.accelerator)
        with self._this_rank_only():
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        self._step_losses.add(loss, weight)
        return loss if weight > 0 else torch.zeros_like(loss)

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        # The trainer is about to log the mean over ranks of a sum over the steps since the last log.
        if self._weighted and self.control.should_log and self.state.global_step > self._globalstep_last_logged:  # type: ignore[attr-defined]
            tr_loss.fill_(self._step_losses.take())
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)  # type: ignore[misc]

    def _weights_of(self, batches: list[Any], items: Any) -> TokenWeights:
        scaled: bool | None = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled or (scaled is None and items is not None):
            own = sum(self.count_items(batch) for batch in batches) if items is None else items
            return TokenWeights.of_sums(own, len(batches))
        # The trainer doesn't divide what the user's loss function returns for batches without labels.
        undivided = scaled is None and self.compute_loss_func is not None  # type: ignore[attr-defined]
        return TokenWeights.of_means([self.count_items(b) for b in batches], 1 if undivided else len(batches))

    @contextmanager
    def _this_rank_only(self) -> Iterator[None]:
        """Count tokens and divide losses as on a single rank."""
        before, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = before


class TorchDDPTrainer(TorchDDPTrainerMixin, Trainer):
    """``transformers.Trainer`` on torchddp's engine. See :class:`TorchDDPTrainerMixin`."""
