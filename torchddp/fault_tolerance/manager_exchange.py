"""What a communication hook sends between the replicas of a torchft Manager: exact sums, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from torchddp.fault_tolerance.quorum import count_participants

if TYPE_CHECKING:
    from torchddp.fault_tolerance.manager_group import ManagerGroup

__all__ = ["ManagerExchange"]


class ManagerExchange:
    """The part of `torchddp.comm_hooks.exchange.Exchange` that hooks need which send nothing but exact sums.

    Not collective to make. A sum that fails raises nothing: its values are of no use then, and the manager knows.
    """

    rank = 0
    is_shared = True  # with the sums of maps of used parameters, which the main thread would send
    is_alone = False  # a replica that heals must get the sum of the others, though only one takes part

    def __init__(self, group: ManagerGroup) -> None:
        self.process_group = group
        self.sent_bytes = 0

    @property
    def world_size(self) -> int:
        """How many replicas take part in this step."""
        return count_participants(self.process_group.manager)

    def step_after(self, number: int) -> int:
        """All replicas count the steps that were committed, however many of them each has made itself."""
        return self.process_group.manager.current_step() + 1

    def sum_(self, flat: Tensor) -> None:
        """In place: the sum over the replicas that take part, the same bits on each."""
        if flat.numel() == 0:
            return
        self.process_group.allreduce([flat]).wait()
        size = self.world_size
        self.sent_bytes += 2 * flat.nbytes * (size - 1) // size
