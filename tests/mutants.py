"""Deliberately broken DDP classes, which several checks of tests/behaviours must notice.

A suite that passes on one of these would not have noticed the bug in the real class either.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook

from tests.harness import class_under_test

Base: Any = class_under_test()


class DoubleGrad(Base):
    """Gradients twice too large."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        for p in module.parameters():
            if p.requires_grad:
                p.register_hook(lambda grad: grad * self.factor())

    def factor(self) -> float:
        return 2


class SumNotMean(DoubleGrad):
    """The sum over ranks instead of their mean."""

    def factor(self) -> float:
        return dist.get_world_size(self.process_group) if self.require_backward_grad_sync else 1


class SlightlyOff(DoubleGrad):
    """A millionth too much on one rank."""

    def factor(self) -> float:
        return 1 + 1e-6 if dist.get_rank(self.process_group) == 1 else 1


class NoAllReduce(Base):
    """Each rank keeps its own gradients."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.no_sync():
            return super().forward(*args, **kwargs)


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


class DropsAccumulated(Base):
    """What was accumulated before the synchronised step is lost."""

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


class AlwaysSyncsBuffers(Base):
    """Buffers that the user wanted local, or ignored, are broadcast all the same."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if hasattr(module, "_ddp_params_and_buffers_to_ignore"):
            module._ddp_params_and_buffers_to_ignore = set()  # type: ignore[assignment]
        super().__init__(module, *args, **{**kwargs, "forward_sync_buffers": True})


class IgnoresNoSync(Base):
    """no_sync does nothing."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


class IgnoresIgnored(Base):
    """Parameters and buffers to be left alone are handled like all others."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if hasattr(module, "_ddp_params_and_buffers_to_ignore"):
            del module._ddp_params_and_buffers_to_ignore
        super().__init__(module, *args, **kwargs)


class HookIgnored(Base):
    """Communication hooks are accepted and never called."""

    def register_comm_hook(self, state: object, hook: Any) -> None:
        pass

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        pass


class HookResultLost(Base):
    """The hook runs on a copy: what it returns is thrown away and rank-local gradients stay."""

    def register_comm_hook(self, state: object, hook: Any) -> None:
        def lost(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            kept = bucket.buffer().clone()
            bucket.set_buffer(bucket.buffer().clone())
            return hook(state, bucket).then(lambda _: kept)

        super().register_comm_hook(state, lost)


class AlwaysUnusedSearch(Base):
    """find_unused_parameters is always on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "find_unused_parameters": not kwargs.get("static_graph", False)})


class NoJoinShadow(Base):
    """A rank that has joined no longer takes part in what the others still send."""

    def join_hook(self, **kwargs: Any) -> Any:
        return JoinHook()


class OnlyTensorOutputs(Base):
    """The search for unused parameters looks at bare tensors only."""

    def _post_forward(self, output: Any) -> Any:
        return super()._post_forward(output) if isinstance(output, Tensor) else output


class NoLogging(Base):
    """Nothing is told."""

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}


def _with(**options: Any) -> Any:
    """Has these options whatever it is given."""
    return type("With", (Base,), {"__init__": lambda self, *a, **kw: Base.__init__(self, *a, **{**kw, **options})})


MUTANTS: dict[str, Any] = {
    name: value
    for name, value in list(globals().items())
    if isinstance(value, type) and issubclass(value, Base) and value is not Base
}
MUTANTS |= {
    "NoInitSync": _with(init_sync=False),
    "NoBucketView": _with(gradient_as_bucket_view=False),
    "AlwaysBucketView": _with(gradient_as_bucket_view=True),
    "NoUnusedSearch": _with(find_unused_parameters=False),
    "NoStaticGraph": _with(static_graph=False),
}
