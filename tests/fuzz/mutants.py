"""Classes with a fault that the fuzzer must find, in addition to those of tests/mutants.py."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.mutants import Base, with_options


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


class DropsAccumulated(Base):
    """Loses what was accumulated before the synchronized step."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.require_backward_grad_sync:
            self.zero_grad()
        return super().forward(*args, **kwargs)


class NoBufferSync(Base):
    """Buffers are never broadcast after construction."""

    def _sync_buffers(self) -> None:
        pass


class BuffersFromLastRank(Base):
    """Buffers follow the last rank instead of rank 0."""

    def _default_broadcast_coalesced(self, *args: Any, **kwargs: Any) -> None:
        last = dist.get_world_size(self.process_group) - 1
        super()._default_broadcast_coalesced(*args, **{**kwargs, "authoritative_rank": last})


class IgnoresNoSync(Base):
    """no_sync does nothing."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


class IgnoresIgnored(Base):
    """Handles ignored parameters and buffers like all others."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if hasattr(module, "_ddp_params_and_buffers_to_ignore"):
            del module._ddp_params_and_buffers_to_ignore
        super().__init__(module, *args, **kwargs)


class HookResultLost(Base):
    """Runs the hook on a copy and drops its result, so that rank-local gradients stay."""

    def register_comm_hook(self, state: object, hook: Any) -> None:
        def lost(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            kept = bucket.buffer().clone()
            bucket.set_buffer(bucket.buffer().clone())
            return hook(state, bucket).then(lambda _: kept)

        super().register_comm_hook(state, lost)


class OnlyTensorOutputs(Base):
    """Searches for unused parameters only from outputs that are bare tensors."""

    def _post_forward(self, output: Any) -> Any:
        return super()._post_forward(output) if isinstance(output, Tensor) else output


NoInitSync = with_options("NoInitSync", init_sync=False)
NoUnusedSearch = with_options("NoUnusedSearch", find_unused_parameters=False)


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
