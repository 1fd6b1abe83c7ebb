"""The DistributedDataParallel that drives a replicated module from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from torchddp import _torch
from torchddp.composable.dtensors import LocalParameters
from torchddp.ddp.model import local_of
from torchddp.ddp.module import DistributedDataParallel
from torchddp.ddp.session import ReducerPolicy, ReducerSession


class ReplicatePolicy(ReducerPolicy):
    who = "replicate()"

    def __init__(self, mp_policy: object) -> None:
        self.local = LocalParameters([], {})
        self._mp_policy = mp_policy

    def compared(self) -> dict[str, str]:
        return {"mp_policy": str(self._mp_policy)}

    def parameters(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        self.local = LocalParameters(parameters, self.local.leaves())
        return self.local.for_reducer

    def opened(self, session: ReducerSession) -> None:
        self.local.connect(session.reducer)

    def closing(self, session: ReducerSession) -> None:
        self.local.disconnect()


class ReplicateEngine(DistributedDataParallel):
    """Driven by hooks on the replicated module, never called. ``left_out``: returns the names to ignore in it now."""

    def __init__(
        self, module: torch.nn.Module, left_out: Callable[[], set[str]], policy: object, **options: Any
    ) -> None:
        self._policy = self._replicate = ReplicatePolicy(policy)
        self._left_out = left_out
        self.refreshed: Callable[[], None] = lambda: None  # called after `refresh_trainable`
        super().__init__(module, **options)

    @property
    def _called(self) -> torch.nn.Module:
        module: torch.nn.Module = self.module
        return module

    @property
    def _local(self) -> LocalParameters:
        return self._replicate.local

    @property
    def _leaves(self) -> dict[int, torch.nn.Parameter]:
        """For communication hooks: the leaf that replaces each DTensor in a bucket."""
        return self._local.leaves()

    def _assign_modules_buffers(self) -> None:
        super()._assign_modules_buffers()
        self.modules_buffers = [local_of(buffer) for buffer in self.modules_buffers]
        self.named_module_buffers = {name: local_of(b) for name, b in self.named_module_buffers.items()}

    def _search_from(self, output: object) -> list[torch.Tensor]:
        outputs = super()._search_from(output)
        return outputs + self._local.reached_from(outputs) if self._local else outputs

    def _post_forward(self, output: object) -> object:
        output = super()._post_forward(output)
        # Averages of parameters that only other ranks used arrive without a hook.
        differ = self.find_unused_parameters or self.static_graph or self.skip_all_reduce_unused_params
        if differ and self._local and torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._local.around_backward(_torch.find_tensors(output))
        return output

    def reduce(self) -> None:
        self._local.take_gradients()
        super().reduce()
        self._local.give_gradients()

    def reduce_next_backward(self) -> None:
        """Reduce the gradients of a forward that began without synchronization in its backward."""
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.reducer.prepare_for_backward([], self.session.has_backward_hooks)

    def _names_to_ignore(self) -> set[str]:
        return super()._names_to_ignore() | self._left_out()

    def refresh_trainable(self) -> None:
        super().refresh_trainable()
        self.refreshed()

    def release(self) -> None:
        """Not collective. The module's backwards reduce nothing from now on."""
        self.session.close()
        self.observers.close()

    def join(self, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"rank {self.session.rank}: a replicated module can't be used with join(), which needs "
            "a wrapper around the training loop. Give all ranks the same number of batches (torchddp.sync "
            "has even_batches for that), or wrap the model in torchddp.DistributedDataParallel."
        )

    def forward(self, *inputs: object, **kwargs: object) -> NoReturn:
        raise RuntimeError("call the module that was given to torchddp.replicate(), not its engine")
