"""What a replicated module has besides itself: an engine, and the hooks that run it around forward."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed._composable_state import _State
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp.composable.engine import ReplicateEngine
from torchddp.composable.precision import ParameterCast, cast_tensors, in_backward
from torchddp.diagnose.rank_state import note_exception

_CALL = torch.nn.Module._call_impl.__code__


class ReplicateState(_State):
    """Made by torch's ``contract``, filled by `install`."""

    engine: ReplicateEngine
    policy: Any  # a MixedPrecisionPolicy
    cast: ParameterCast | None

    def __init__(self) -> None:
        super().__init__()
        self._is_open = False  # the module is running its forward
        self._recurses = False  # it has called itself meanwhile, which is part of the same step
        self._outer: TorchDDP | None = None
        self._had_graph = False
        self.unreduced_forward = False
        self._handles: list[Any] = []

    def install(
        self, module: torch.nn.Module, engine: ReplicateEngine, policy: Any, cast: ParameterCast | None
    ) -> None:
        self.engine, self.policy, self.cast = engine, policy, cast
        # Outermost on both sides, but for hooks that are registered later.
        self._handles = [
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._after_forward),
            module.register_forward_hook(self._after_failure, always_call=True),
        ]

    def hooked_modules(self, module: torch.nn.Module) -> list[tuple[torch.nn.Module, list[Any]]]:
        """The modules that have hooks of ours, with the handles of those; ``module`` first."""
        others = [] if self.cast is None else [(owner.module, owner.handles) for owner in self.cast.owners]
        return [(module, self._handles), *others]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self.cast is not None:
            self.cast.remove()
        self.engine.release()

    # --- hooks ---

    @torch._disable_dynamo(recursive=True)
    def _before_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self._is_open:
            if _calls_itself(module):
                self._recurses = True
                return args, kwargs
            self._close()  # a KeyboardInterrupt, of which hooks don't hear, has ended the forward before
        if "fully_shard" in module.__dict__[REGISTRY_KEY]:
            raise RuntimeError(
                "this module was given to fully_shard() after torchddp.replicate(), and both would reduce its "
                "gradients: take one of them, or fully_shard() for modules inside, before replicate()"
            )
        if in_backward():
            self._check_rerun()
            return self._cast_inputs(args, kwargs)
        self._is_open = True
        self._outer, TorchDDP._active_ddp_module = TorchDDP._active_ddp_module, self.engine
        args, kwargs = self.engine._pre_forward(*args, **kwargs)
        if torch.is_grad_enabled():
            self._had_graph = True
            self.unreduced_forward = not self.engine.require_backward_grad_sync
        args, kwargs = self._cast_inputs(args, kwargs)
        if self.cast is not None:
            self.cast.enter()
        return args, kwargs

    @torch._disable_dynamo(recursive=True)
    def _after_forward(self, module: torch.nn.Module, _args: Any, output: Any) -> Any:
        if self._is_open:
            if self._recurses and _calls_itself(module):
                return output
            self._close()
            output = self.engine._post_forward(output)
        return cast_tensors(output, self.policy.output_dtype)

    @torch._disable_dynamo(recursive=True)
    def _after_failure(self, module: torch.nn.Module, _args: Any, _output: Any) -> None:
        """Also called when all went well, but then there is nothing left to close."""
        if not self._is_open or (self._recurses and _calls_itself(module)):
            return
        self._close()
        error = sys.exc_info()[1]
        if error is not None:
            note_exception(error, "forward")

    # --- what they do ---

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not self.policy.cast_forward_inputs:
            return args, kwargs
        return cast_tensors(args, self.policy.param_dtype), cast_tensors(kwargs, self.policy.param_dtype)

    def _close(self) -> None:
        self._is_open = self._recurses = False
        TorchDDP._active_ddp_module, self._outer = self._outer, None
        if self.cast is not None:
            self.cast.leave()

    def _check_rerun(self) -> None:
        """A forward during backward repeats one for activation checkpointing, and is no step."""
        if torch.is_grad_enabled() and not self._had_graph:
            raise RuntimeError(
                f"a replicated module (rank {self.engine._own_rank}) runs inside of checkpoint(use_reentrant=True): "
                "its forward has no graph until backward, so its gradients would not be reduced. Take "
                "use_reentrant=False, or replicate the model as a whole."
            )


def _calls_itself(module: torch.nn.Module) -> bool:
    """Whether the call of ``module`` that runs the hook we are in was made inside of another call of it."""
    frame: FrameType | None = sys._getframe(1)
    calls = 0
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is module:
            calls += 1
        frame = frame.f_back
    return calls > 1
