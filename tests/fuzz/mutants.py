"""Classes with a fault that the fuzzer must find, beside those of tests/mutants.py."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from tests.mutants import Base


class ChangesKept(Base):
    """Gradients of the step before are written to, where a program still holds them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.before: list[torch.Tensor] = []
        for p in self.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._note)

    def _note(self, p: torch.Tensor) -> None:
        if p.grad is not None and not p.grad.is_sparse:
            self.before.append(p.grad)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        now = {id(p.grad) for p in self.parameters()}
        for grad in self.before:
            if id(grad) not in now:
                grad.add_(1)
        self.before.clear()
        return super().forward(*args, **kwargs)


class ZerosForNone(Base):
    """Parameters without a gradient get one of zeros."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for p in self.parameters():
            if p.requires_grad and p.grad is None and torch.is_grad_enabled():
                p.grad = torch.zeros_like(p)
        return super().forward(*args, **kwargs)


class OtherError(Base):
    """Errors of another type than torch's."""

    def register_comm_hook(self, state: object, hook: Any) -> None:
        def fail(state: object, bucket: Any) -> Any:
            try:
                return hook(state, bucket)
            except KeyError as error:
                raise OSError(str(error)) from error

        super().register_comm_hook(state, fail)


class DrawsNumbers(Base):
    """Takes numbers from the generator that the program's own dropout uses."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        torch.rand(1)
        return super().forward(*args, **kwargs)


class Dies(Base):
    """Rank 1 is gone in a forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.distributed.get_rank() == 1:
            self.end()
        return super().forward(*args, **kwargs)

    def end(self) -> None:
        os.abort()


class Hangs(Dies):
    """Rank 1 never comes back from a forward."""

    def end(self) -> None:
        time.sleep(10_000)
