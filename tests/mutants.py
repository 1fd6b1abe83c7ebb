"""Deliberately broken DDP classes, each of which several checks of tests/behaviors must catch; tests/fuzz has others.

A suite that passes with one of these would miss the same bug in the real class.
"""

from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook

from tests.harness import class_under_test

Base: Any = class_under_test()


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


class HookIgnored(Base):
    """Communication hooks are accepted and never called."""

    def register_comm_hook(self, state: object, hook: Any) -> None:
        pass

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        pass


class AlwaysUnusedSearch(Base):
    """find_unused_parameters is always on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "find_unused_parameters": not kwargs.get("static_graph", False)})


class NoJoinShadow(Base):
    """A joined rank doesn't shadow the other ranks' collectives."""

    def join_hook(self, **kwargs: Any) -> Any:
        return JoinHook()


class NoLogging(Base):
    """Reports no logging data."""

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}


def with_options(name: str, **options: Any) -> Any:
    """A class of this name that overrides these constructor options."""
    return type(name, (Base,), {"__init__": lambda self, *a, **kw: Base.__init__(self, *a, **{**kw, **options})})


NoBucketView = with_options("NoBucketView", gradient_as_bucket_view=False)
NoStaticGraph = with_options("NoStaticGraph", static_graph=False)

MUTANTS: dict[str, Any] = {
    name: value
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, Base) and value is not Base
}
