"""The DistributedDataParallel that works for a replicated module, from outside of it."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.nn.parallel.distributed import _find_tensors

from torchddp.composable.dtensors import LocalParameters
from torchddp.ddp.local_tensors import local_of
from torchddp.ddp.module import DistributedDataParallel


class ReplicateEngine(DistributedDataParallel):
    """Never called: the hooks of the module that it was made for begin and end its forward."""

    _local: LocalParameters

    def _ddp_init_helper(
        self,
        parameters: list[torch.Tensor],
        expect_sparse_gradient: Any,
        param_to_name_mapping: Any,
        static_graph: bool,
    ) -> None:
        self._local = LocalParameters(parameters)
        self._leaves = {id(pair.dtensor): pair.leaf for pair in self._local.pairs}
        super()._ddp_init_helper(self._local.for_reducer, expect_sparse_gradient, param_to_name_mapping, static_graph)
        self._reduced_ids |= {id(p) for p in parameters}
        self._local.connect(self.reducer)

    def _assign_modules_buffers(self) -> None:
        super()._assign_modules_buffers()
        self.modules_buffers = [local_of(buffer) for buffer in self.modules_buffers]
        self.named_module_buffers = {name: local_of(b) for name, b in self.named_module_buffers.items()}

    def _search_from(self, output: Any) -> list[torch.Tensor]:
        outputs = super()._search_from(output)
        return outputs + self._local.reached_from(outputs) if self._local else outputs

    def _post_forward(self, output: Any) -> Any:
        output = super()._post_forward(output)
        # Ranks may use different parameters: the averages of those that this one did not use come with no hook.
        differ = self.find_unused_parameters or self.static_graph or self.skip_all_reduce_unused_params
        if differ and self._local and torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._local.around_backward(_find_tensors(output))
        return output

    def reduce(self) -> None:
        self._local.take_gradients()
        super().reduce()
        self._local.give_gradients()

    def reduce_next_backward(self) -> None:
        """Gradients of a forward that was begun without synchronisation are reduced in its backward after all."""
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.reducer.prepare_for_backward([])

    def release(self) -> None:
        """Not collective. The module's backwards reduce nothing from now on."""
        self._local.disconnect()
        self.reducer.remove_autograd_hooks()
        self._hang_reports.close()

    def join(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"rank {self._own_rank}: a module of torchddp.replicate() can't be used with join(), which wants to stand "
            "around the loop with a wrapper in hand. Give all ranks the same number of batches (torchddp.sync has "
            "even_batches for that), or wrap the model in torchddp.DistributedDataParallel."
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("call the module that was given to torchddp.replicate(), not its engine")
