"""Deliberately broken DDP classes: a suite that passes with one of these would miss the same fault in the real class.

The fuzzer must catch those that tests/fuzz/test_fuzz.py lists.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchddp

Base: Any = torchddp.DistributedDataParallel


class SlightlyOff(Base):
    """Gradients are too large by 1e-6 on one rank."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        factor = 1 + 1e-6 if dist.get_rank(self.process_group) == 1 else 1
        for p in module.parameters():
            if p.requires_grad:
                p.register_hook(lambda grad: grad * factor)


class HookIgnored(Base):
    """Communication hooks are accepted and never called."""

    def register_comm_hook(self, state: object, hook: Any) -> None:
        pass


class NoInitSync(Base):
    """Each rank keeps the weights that it was made with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "init_sync": False})


class ChangesKept(Base):
    """Overwrites the previous step's gradients, which the program may still hold."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.before: list[Tensor] = []
        for p in self.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._note)

    def _note(self, p: Tensor) -> None:
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
    """Gives zeros to parameters without a gradient."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for p in self.parameters():
            if p.requires_grad and p.grad is None and torch.is_grad_enabled():
                p.grad = torch.zeros_like(p)
        return super().forward(*args, **kwargs)


class OtherError(Base):
    """Raises errors of a different type than torch's."""

    def register_comm_hook(self, state: object, hook: Any) -> None:
        def fail(state: object, bucket: Any) -> Any:
            try:
                return hook(state, bucket)
            except KeyError as error:
                raise OSError(str(error)) from error

        super().register_comm_hook(state, fail)


class DrawsNumbers(Base):
    """Draws from the generator that the program's dropout uses."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        torch.rand(1)
        return super().forward(*args, **kwargs)


class NoBufferSync(Base):
    """Buffers are never broadcast after construction."""

    def _sync_buffers(self) -> None:
        pass


class IgnoresNoSync(Base):
    """no_sync does nothing."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


class Dies(Base):
    """Rank 1 dies in a forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            self.end()
        return super().forward(*args, **kwargs)

    def end(self) -> None:
        os.abort()


class Hangs(Dies):
    """Rank 1 never comes back from a forward."""

    def end(self) -> None:
        time.sleep(10_000)
