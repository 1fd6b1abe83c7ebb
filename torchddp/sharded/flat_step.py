"""Many small parameters stepped as a few flat ones, for optimizers that treat each element by itself.

A step of a thousand small parameters is a thousand times a dozen calls of torch's; of the flat memory that
ShardedDataParallel has put them in, it is a dozen. Small parameters of one group that are neighbours there are a
`FlatRun`: their gradients are copied side by side, and the optimizer gets one parameter in their place.

Results are those of a step tensor by tensor, bit for bit, but for ``fused=True`` on the CPU (SGD, Adam, AdamW): torch's
fused kernels round the last few elements of each tensor in another way than the rest, so a new value may differ by the
rounding of one of its terms.

A run stays as it is while its parameters have gradients, or have none, all together. Where they part, the run is cut in
runs that don't, once, so that models with branches settle after a few steps. The state that users see is always up to
date, and always read again if they changed it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from torchddp.sharded.flat_run import SCALARS, FlatRun

# Parameters with at least as many elements stay alone: a call for each costs little beside the work on them, and
# their gradients are not to be copied.
SMALL_NUMEL = 65_536

# These classes themselves: a class derived from one of them may do anything.
ELEMENTWISE = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Rprop,
    }
)


class FlatStep:
    """Puts runs in the place of an optimizer's small parameters while it steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._possible = type(optimizer) in ELEMENTWISE
        self.forget()

    def forget(self) -> None:
        """To be called when the optimizer has other parameters, or other state: runs are found anew."""
        self._memory: list[torch.Tensor] = []
        self._runs: list[tuple[int, FlatRun]] = []  # with the number of their group
        self._alone: list[list[torch.Tensor]] = []  # the other parameters, by group

    @contextmanager
    def handed_over(self, memory: Sequence[torch.Tensor]) -> Iterator[None]:
        """Within, the optimizer's groups hold flat parameters. ``memory``: flat tensors that parameters may lie in.

        Between the optimizer's parameters ``memory`` must be free to write to.
        """
        hooks = self._optimizer._optimizer_step_pre_hooks or self._optimizer._optimizer_step_post_hooks
        if not memory or not self._possible or hooks:  # a hook is to see the parameters it knows
            yield
            return
        self._refresh(memory)
        groups, state = self._optimizer.param_groups, self._optimizer.state
        whole = [group["params"] for group in groups]
        stepped = [(number, run) for number, run in self._runs if run.params[0].grad is not None]
        try:
            for group, alone in zip(groups, self._alone, strict=True):
                group["params"] = list(alone)
            for number, run in stepped:
                run.hand_over(state)
                groups[number]["params"].append(run.flat)
            yield
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
            for _, run in stepped:
                run.take_back(state)

    def _refresh(self, memory: Sequence[torch.Tensor]) -> None:
        """Runs for the memory, gradients and state there are now."""
        state = self._optimizer.state
        if len(memory) != len(self._memory) or not all(map(is_, memory, self._memory)):
            self.forget()
            self._memory = list(memory)
            for flat, places in zip(memory, self._by_memory(), strict=True):
                self._runs += _cut(places, flat, state)
        else:
            known, self._runs = self._runs, []
            for number, run in known:
                if run.is_current(state):
                    self._runs.append((number, run))
                    continue
                self._runs += _cut([(number, param) for param in run.params], run.memory, state)
                if not all(_lies_in(param, run.memory) for param in run.params):
                    self._memory = []  # it is brought back after this step: then there may be longer runs again
            if len(known) == len(self._runs) and all(a is b for (_, a), (_, b) in zip(known, self._runs, strict=True)):
                return
        in_runs = {param for _, run in self._runs for param in run.params}
        self._alone = [
            [param for param in group["params"] if param not in in_runs] for group in self._optimizer.param_groups
        ]

    def _by_memory(self) -> list[list[tuple[int, torch.Tensor]]]:
        """The parameters in each flat tensor, in the order they lie there, with the number of their group."""
        starts = sorted((flat.data_ptr(), place) for place, flat in enumerate(self._memory))
        found: list[list[tuple[int, torch.Tensor]]] = [[] for _ in self._memory]
        for number, group in enumerate(self._optimizer.param_groups):
            for param in group["params"]:
                at = bisect_right(starts, (param.data_ptr(), len(starts))) - 1
                if at >= 0 and _lies_in(param, self._memory[starts[at][1]]):
                    found[starts[at][1]].append((number, param))
        return [sorted(places, key=lambda place: place[1].data_ptr()) for places in found]


def _cut(
    places: Sequence[tuple[int, torch.Tensor]], memory: torch.Tensor, state: MutableMapping[torch.Tensor, Any]
) -> list[tuple[int, FlatRun]]:
    """Runs of two or more neighbours that can be stepped as one. ``places``: parameters, and the numbers of groups."""
    runs = []
    for (number, kind), alike in groupby(places, lambda place: (place[0], _kind(place[1], memory, state))):
        params = [param for _, param in alike]
        if kind is not None and len(params) > 1:
            runs.append((number, FlatRun(params, memory, state)))
    return runs


def _kind(param: torch.Tensor, memory: torch.Tensor, state: Mapping[torch.Tensor, Any]) -> Hashable:
    """What parameters of a run have in common. None if this one can only be stepped alone."""
    grad, entry = param.grad, state.get(param, {})
    # The last elements of a tensor of 16 bits are rounded more often than the others on the CPU.
    exact = param.is_floating_point() and (param.itemsize >= 4 or param.device.type != "cpu")
    dense = param.is_contiguous() or param.is_contiguous(memory_format=torch.channels_last)
    plain = type(param) in (torch.Tensor, torch.nn.Parameter) and param.numel() < SMALL_NUMEL
    if not (plain and exact and dense and _lies_in(param, memory)):
        return None
    if grad is not None and grad.dtype != param.dtype:
        return None
    values = [_kind_of_state(key, value, param) for key, value in entry.items()]
    return None if None in values else (grad is not None, *values)


def _kind_of_state(key: str, value: Any, param: torch.Tensor) -> Hashable:
    """As `_kind`, of one entry of the parameter's state."""
    if not isinstance(value, torch.Tensor):
        return None
    if key in SCALARS:
        return (key, value.dtype, value.device, value.item()) if value.dim() == 0 else None
    return (key, value.dtype) if value.shape == param.shape and value.device == param.device else None


def _lies_in(param: torch.Tensor, memory: torch.Tensor) -> bool:
    begin = param.data_ptr() - memory.data_ptr()
    inside = 0 <= begin and begin + param.numel() * param.itemsize <= memory.numel() * memory.itemsize
    return inside and param.dtype == memory.dtype and param.device == memory.device and begin % memory.itemsize == 0
