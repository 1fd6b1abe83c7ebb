"""Deliberately broken DDP classes: a suite that passes with one of these would miss the same fault in the real class.

tests/parity/test_behavior.py must catch those of `IN_CLASS`, and the fuzzer those that tests/fuzz/test_fuzz.py lists.
"""

import os
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook

import torchddp

Base: Any = torchddp.DistributedDataParallel


class DoubleGrad(Base):
    """Gradients are twice as large as they should be."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        for p in module.parameters():
            if p.requires_grad:
                p.register_hook(lambda grad: grad * self.factor())

    def factor(self) -> float:
        return 2


class SlightlyOff(DoubleGrad):
    """Gradients are too large by 1e-6 on one rank."""

    def factor(self) -> float:
        return 1 + 1e-6 if dist.get_rank(self.process_group) == 1 else 1


class OnlyFirstStep(Base):
    """Stops all-reducing after the first step, as a static graph with accumulation once did."""

    forwards = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards += 1
        with self.no_sync() if self.forwards > 1 else nullcontext():
            return super().forward(*args, **kwargs)


class ForgetsOneParameter(Base):
    """The first parameter is never reduced."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        first = next(name for name, _ in module.named_parameters())
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        module._ddp_params_and_buffers_to_ignore = ignored | {first}  # type: ignore[assignment]
        super().__init__(module, *args, **kwargs)


class AlwaysUnusedSearch(Base):
    """find_unused_parameters is always on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "find_unused_parameters": not kwargs.get("static_graph", False)})


def with_methods(name: str, **methods: Any) -> Any:
    """A class of this name with other methods."""
    return type(name, (Base,), methods)


def with_options(name: str, **options: Any) -> Any:
    """A class of this name that overrides these constructor options."""
    return with_methods(name, __init__=lambda self, *a, **kw: Base.__init__(self, *a, **{**kw, **options}))


# Hooks are accepted and never called.
HookIgnored = with_methods(
    "HookIgnored",
    register_comm_hook=lambda self, state, hook: None,
    _register_builtin_comm_hook=lambda self, comm_hook_type: None,
)
# A joined rank doesn't shadow the other ranks' collectives.
NoJoinShadow = with_methods("NoJoinShadow", join_hook=lambda self, **kwargs: JoinHook())
NoLogging = with_methods("NoLogging", _get_ddp_logging_data=lambda self: {})
NoBufferSync = with_methods("NoBufferSync", _sync_buffers=lambda self: None)
IgnoresNoSync = with_methods("IgnoresNoSync", no_sync=lambda self: nullcontext())
NoBucketView = with_options("NoBucketView", gradient_as_bucket_view=False)
NoStaticGraph = with_options("NoStaticGraph", static_graph=False)
NoInitSync = with_options("NoInitSync", init_sync=False)
NoUnusedSearch = with_options("NoUnusedSearch", find_unused_parameters=False)
IN_CLASS = [
    "DoubleGrad", "SlightlyOff", "OnlyFirstStep", "ForgetsOneParameter", "HookIgnored", "AlwaysUnusedSearch",
    "NoJoinShadow", "NoLogging", "NoBucketView", "NoStaticGraph",
]  # fmt: skip


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
