"""DTensor parameters for the engine: separate leaf tensors over the memory of this rank's part.

Autograd accumulates into the DTensor; the engine's leaf is never part of a graph. When a gradient arrives, a hook
passes this rank's part of it to the leaf and notifies the reducer, which handles it like any other: buckets, overlap
and views. What the reducer puts in the leaf's ``.grad`` becomes the DTensor's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchddp import _C, _torch
from torchddp.ddp.model import is_dtensor, local_of

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


class LocalParameters:
    """A model's parameters for its reducer, some of which are DTensors. ``known``: the previous `leaves`."""

    def __init__(self, parameters: Sequence[torch.Tensor], known: Mapping[int, torch.nn.Parameter]) -> None:
        self.pairs: list[LocalParameter] = []
        self.for_reducer: list[torch.Tensor] = []
        for index, parameter in enumerate(parameters):
            if is_dtensor(parameter):
                local, leaf = local_of(parameter).detach(), known.get(id(parameter))
                if leaf is None or leaf.data_ptr() != local.data_ptr() or leaf.dtype != local.dtype:
                    leaf = torch.nn.Parameter(local)
                self.pairs.append(LocalParameter(index, parameter, leaf))
                parameter = leaf
            self.for_reducer.append(parameter)
        self._handles: list[Any] = []

    def leaves(self) -> dict[int, torch.nn.Parameter]:
        return {id(pair.dtensor): pair.leaf for pair in self.pairs}

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def connect(self, reducer: _C.Reducer) -> None:
        weak = weakref.ref(reducer)
        for pair in self.pairs:
            hook = _ready_hook(pair.index, pair.leaf, weak)
            self._handles.append(pair.dtensor.register_post_accumulate_grad_hook(hook))

    def disconnect(self) -> None:
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
        with_graph = [t for t in outputs if t.requires_grad]
        if with_graph:
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
    def turn() -> None:
        if turns > 1:
            _after_backward(action, turns - 1)
        else:
            action()

    _torch.at_end_of_backward(turn)
