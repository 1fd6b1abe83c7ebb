"""The DistributedDataParallel that drives a replicated module from outside, with leaf tensors for DTensor parameters.

A leaf lies over the memory of this rank's part. Autograd accumulates into the DTensor; the leaf is never in a graph.
When a gradient arrives, a hook passes this rank's part of it to the leaf and notifies the reducer, which handles it
like any other: buckets, overlap and views. What the reducer puts in the leaf's ``.grad`` becomes the DTensor's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from torchddp import _C, _torch
from torchddp.ddp.model import is_dtensor, local_of
from torchddp.ddp.module import DistributedDataParallel
from torchddp.ddp.session import ReducerPolicy, ReducerSession

GRADIENT_IS_LATE = 3  # after this many callbacks in a row, the reducer's own has run, which may queue another


@dataclass(frozen=True)
class LocalParameter:
    index: int
    dtensor: Any
    leaf: torch.nn.Parameter

    def take_gradient(self) -> None:
        """Pass the DTensor's gradient to the leaf. Collective over the DTensor's mesh if its layout differs there."""
        grad = self.dtensor.grad
        if grad is None:
            self.leaf.grad = None
            return
        if grad.placements != self.dtensor.placements:
            # Partial gradients of a weight that every rank holds: the mesh's ranks sum them here, as FSDP2 does.
            grad = self.dtensor.grad = grad.redistribute(placements=self.dtensor.placements)
        local = local_of(grad)
        if self.leaf.grad is not local:
            self.leaf.grad = local

    def give_gradient(self) -> None:
        from torch.distributed.tensor import DTensor

        local, grad = self.leaf.grad, self.dtensor.grad
        if local is None:
            self.dtensor.grad = None
        elif grad is None or local_of(grad) is not local:
            self.dtensor.grad = DTensor.from_local(
                local,
                self.dtensor.device_mesh,
                self.dtensor.placements,
                run_check=False,
                shape=self.dtensor.shape,
                stride=self.dtensor.stride(),
            )


class ReplicatePolicy(ReducerPolicy):
    """The reducer gets leaves in place of DTensors."""

    who = "replicate()"

    def __init__(self, mp_policy: object) -> None:
        self._mp_policy = mp_policy
        self.pairs: list[LocalParameter] = []
        self._handles: list[Any] = []

    def compared(self) -> dict[str, str]:
        return {"mp_policy": str(self._mp_policy)}

    def leaves(self) -> dict[int, torch.nn.Parameter]:
        return {id(pair.dtensor): pair.leaf for pair in self.pairs}

    def parameters(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        known = self.leaves()
        self.pairs, found = [], []
        for index, parameter in enumerate(parameters):
            if is_dtensor(parameter):
                local, leaf = local_of(parameter).detach(), known.get(id(parameter))
                if leaf is None or leaf.data_ptr() != local.data_ptr() or leaf.dtype != local.dtype:
                    leaf = torch.nn.Parameter(local)
                self.pairs.append(LocalParameter(index, parameter, leaf))
                parameter = leaf
            found.append(parameter)
        return found

    def opened(self, session: ReducerSession) -> None:
        weak = weakref.ref(session.reducer)
        for pair in self.pairs:
            self._handles.append(_torch.after_gradient(pair.dtensor, _ready_hook(pair.index, pair.leaf, weak)))

    def closing(self, session: ReducerSession) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @torch.no_grad()
    def take_gradients(self) -> None:
        for pair in self.pairs:
            pair.take_gradient()

    @torch.no_grad()
    def give_gradients(self) -> None:
        for pair in self.pairs:
            pair.give_gradient()

    def around_backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """Wrap the backward through these tensors, for gradients that this rank does not compute."""
        if with_graph := [t for t in outputs if t.requires_grad]:
            torch.autograd.graph.register_multi_grad_hook(with_graph, self._backward_begins, mode="any")

    def _backward_begins(self, _grad: torch.Tensor) -> None:
        for pair in self.pairs:
            if pair.dtensor.grad is None:
                pair.leaf.grad = None  # cleared by zero_grad() since then
        _after_backward(self.give_gradients, GRADIENT_IS_LATE)

    def reached_from(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """For the search for unused parameters: tensors whose graphs lead to the leaves of used DTensors."""
        by_id = self.leaves()
        todo = [t.grad_fn for t in outputs if t.grad_fn is not None]
        seen = set(todo)
        reached = []
        while todo:
            node = todo.pop()
            leaf = by_id.get(id(getattr(node, "variable", None)))
            if leaf is not None:
                reached.append(leaf.view_as(leaf))
            fresh = {next_node for next_node, _ in node.next_functions if next_node is not None} - seen
            seen |= fresh
            todo += fresh
        return reached


def _ready_hook(
    index: int, leaf: torch.nn.Parameter, reducer: weakref.ref[_C.Reducer]
) -> Callable[[torch.Tensor], None]:
    """The hook gets the DTensor as its argument: if it held a reference, the DTensor would never be freed."""

    @torch.no_grad()
    def ready(dtensor: torch.Tensor) -> None:
        pair = LocalParameter(index, dtensor, leaf)
        pair.take_gradient()
        engine = reducer()
        if engine is not None:
            engine._autograd_hook(index)
            pair.give_gradient()

    return ready


def _after_backward(action: Callable[[], None], turns: int) -> None:
    _torch.at_end_of_backward(action if turns == 1 else partial(_after_backward, action, turns - 1))


class ReplicateEngine(DistributedDataParallel):
    """Driven by hooks on the replicated module, never called. ``left_out``: returns the names to ignore in it now."""

    _ddp_policy: ReplicatePolicy

    def __init__(
        self, module: torch.nn.Module, left_out: Callable[[], set[str]], policy: object, **options: Any
    ) -> None:
        self._ddp_policy = ReplicatePolicy(policy)
        self._left_out = left_out
        self.refreshed: Callable[[], None] = lambda: None  # called after `refresh_trainable`
        super().__init__(module, **options)

    @property
    def _called(self) -> torch.nn.Module:
        module: torch.nn.Module = self.module
        return module

    @property
    def _leaves(self) -> dict[int, torch.nn.Parameter]:
        """For communication hooks: the leaf that replaces each DTensor in a bucket."""
        return self._ddp_policy.leaves()

    def _search_from(self, output: object) -> list[torch.Tensor]:
        outputs = super()._search_from(output)
        return outputs + self._ddp_policy.reached_from(outputs) if self._ddp_policy.pairs else outputs

    def _post_forward(self, output: object) -> object:
        output = super()._post_forward(output)
        # Averages of parameters that only other ranks used arrive without a hook.
        differ = self.find_unused_parameters or self.static_graph or self.skip_all_reduce_unused_params
        if differ and self._ddp_policy.pairs and torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._ddp_policy.around_backward(_torch.find_tensors(output))
        return output

    def reduce(self) -> None:
        self._ddp_policy.take_gradients()
        super().reduce()
        self._ddp_policy.give_gradients()

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
