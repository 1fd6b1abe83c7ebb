"""The transformers Trainer, whose models are wrapped in torchddp's class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Trainer

from torchddp.integrations.accelerate.accelerator import adopt
from torchddp.integrations.accelerate.options import TorchDDPKwargs


class TorchDDPTrainerMixin:
    """Before a trainer class: ``class MyTrainer(TorchDDPTrainerMixin, Seq2SeqTrainer)``.

    Takes all that the trainer takes, and ``ddp_kwargs``, a :class:`TorchDDPKwargs` or a dict of its options. Where
    they are silent, the ``ddp_*`` fields of TrainingArguments hold. Left to itself the trainer looks for unused
    parameters in every step, unless the model checkpoints activations: ``ddp_find_unused_parameters=False`` saves that.

    Raises:
        TypeError: an unknown option. ValueError: the arguments choose FSDP or DeepSpeed.
    """

    def __init__(self, *args: Any, ddp_kwargs: TorchDDPKwargs | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._ddp_kwargs = ddp_kwargs
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """The trainer's own accelerator, but for the class that wraps models."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        adopt(self.accelerator, self._ddp_kwargs)  # type: ignore[attr-defined]


class TorchDDPTrainer(TorchDDPTrainerMixin, Trainer):
    """``transformers.Trainer`` over torchddp's engine. See :class:`TorchDDPTrainerMixin`."""
