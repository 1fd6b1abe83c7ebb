"""What `OSS` asks of a data parallel module that reduces gradients to their owners alone, and gathers parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Delivery(Protocol):
    """How updated parameters get from their owners to all ranks, if not by OSS's own messages."""

    def check_new(self, params: list[torch.Tensor]) -> None:
        """ValueError for parameters that can't be delivered."""

    def own_memory(self) -> Sequence[torch.Tensor]:
        """Flat tensors, the same ones until parameters get other memory, in which this rank's parameters lie.

        What is between the optimizer's parameters there is nobody's, and may be written to.
        """

    def before_step(self) -> None:
        """Parameters are about to be changed."""

    def after_step(self) -> None:
        """Collective: this rank has updated its own."""

    def owners_changed(self) -> None:
        """Collective: parameters were added, frozen, thawed, or have found owners."""
