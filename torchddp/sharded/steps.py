"""The step of this rank's optimizers: of all parameters at once, or message by message while the others travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Muon

from torchddp.sharded.flat_step import ELEMENTWISE, FlatStep
from torchddp.sharded.group_optimizers import GroupOptimizers
from torchddp.sharded.parameter_sync import Messages, Sender


class OwnedSteps:
    """Steps this rank's parameters and sends them.

    Where the optimizers' classes are known to compute each parameter from nothing but its own gradient and state, a
    message's parameters are stepped just before it is sent, and travel while those of the next are stepped. Other
    classes may count their steps, so they step everything first.
    """

    def __init__(self, optimizers: GroupOptimizers, rank: int) -> None:
        self._optimizers, self._rank = optimizers, rank
        self.reset()

    def reset(self) -> None:
        """Call when the optimizers have new parameters or new state."""
        self._whole = FlatStep(self._optimizers)
        self._parts: list[FlatStep | None] = []  # of this rank's messages
        self._rest = self._whole  # of parameters that are in no message
        self._messages: Messages = []

    def run(self, sender: Sender, memory: Sequence[torch.Tensor]) -> None:
        """Collective. ``memory``: flat memory of all parameters of this rank, if there is any."""
        apart = self._may_be_apart(sender)
        failed: list[Exception] = []
        if apart:
            self._divide(sender.messages)
        else:
            _run(self._whole, memory, failed)
        self._send(sender, failed, apart=apart)

    def switch(self, mode: str, sender: Sender) -> None:
        """Collective: switch this rank's parameters to ``train`` or ``eval``, and send them."""
        self._optimizers.switch(mode)
        self._send(sender, [], apart=False)

    def _send(self, sender: Sender, failed: list[Exception], *, apart: bool) -> None:
        """Raises ``failed`` at the end: other ranks wait for all messages."""
        try:
            sender.begin()
            messages: Messages = sender.messages
            for index, message in enumerate(messages):
                if apart:
                    _run(self._parts[index], message.memory, failed)
                sender.send(index)
            if apart:
                _run(self._rest, (), failed)
            sender.finish()
        except Exception:
            if not failed:
                raise
        if failed:
            raise failed.pop()  # rather than an error of sending, which may follow from it

    def _may_be_apart(self, sender: Sender) -> bool:
        kinds = {*self._optimizers.kinds}
        if not sender.messages or self._optimizers.has_step_hooks or not kinds <= {Muon, *ELEMENTWISE}:
            return False
        return Muon in kinds or not sender.needs_this_core

    def _divide(self, messages: Messages) -> None:
        if messages is self._messages:
            return
        self._messages = messages
        own = [set(message.params) if message.owner == self._rank else None for message in messages]
        self._parts = [None if params is None else FlatStep(self._optimizers, params) for params in own]
        sent: set[torch.Tensor] = set().union(*(params for params in own if params is not None))
        rest = {p for group in self._optimizers.param_groups for p in group["params"] if p not in sent}
        self._rest = FlatStep(self._optimizers, rest)


def _run(step: FlatStep | None, memory: Sequence[torch.Tensor], failed: list[Exception]) -> None:
    """Unless one has failed before."""
    if step is not None and not failed:
        try:
            step.run(memory)
        except Exception as error:
            failed.append(error)
