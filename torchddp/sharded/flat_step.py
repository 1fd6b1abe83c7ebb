"""Steps many small parameters as a few flat ones, for element-wise optimizers.

Stepping a thousand small parameters takes a thousand times a dozen kernel calls; stepping the flat buffers of
ShardedDataParallel takes a dozen. Small parameters of one group that are neighbors in a buffer become a
`FlatParameter` (as in FSDP): their gradients are copied side by side, and the optimizer steps one tensor instead.

Results equal those of stepping tensor by tensor, bit for bit, except with ``fused=True`` on the CPU (SGD, Adam, AdamW):
torch's fused kernels round the last few elements of each tensor differently, so a value may differ by one rounding.

A flat parameter lasts as long as all or none of its parameters have gradients. Otherwise it is split permanently, so
models with branches settle after a few steps. The state that users see is up to date, and read again if they change it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Hashable, Mapping, MutableMapping, Sequence
from itertools import groupby
from operator import is_
from typing import Any

import torch

from torchddp import _C, _torch
from torchddp.sharded.group_optimizers import GroupOptimizers

# From this size on, parameters are stepped alone: a call costs less than copying their gradients.
SMALL_NUMEL = 65_536

# State that torch's optimizers keep once per parameter; everything else is per element.
SCALAR_STATE = frozenset({"step", "mu_product"})

# Exactly these classes, because a subclass may do anything.
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

State = MutableMapping[torch.Tensor, Any]  # the optimizer's: a dict per parameter, as torch types it


class FlatStep:
    """The step of some parameters, or of all, with flat ones in place of small ones.

    Make a new one when the optimizers have new parameters or new state.
    """

    def __init__(self, optimizers: GroupOptimizers, params: Collection[torch.Tensor] | None = None) -> None:
        self._optimizers = optimizers
        self._params = [  # by group
            [param for param in group["params"] if params is None or param in params]
            for group in optimizers.param_groups
        ]
        self._possible = [kind in ELEMENTWISE for kind in optimizers.kinds]
        self._forget()

    def _forget(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._flat: list[tuple[int, FlatParameter]] = []  # with their group's number
        self._alone: list[list[torch.Tensor]] = []  # the other parameters, by group

    def run(self, buffers: Sequence[torch.Tensor]) -> None:
        """``buffers``: memory of the parameters, if there is any; gaps in it may be written to."""
        # Step hooks must see the original parameters.
        if not buffers or not any(self._possible) or self._optimizers.has_step_hooks:
            with self._optimizers.holding(self._params):
                self._optimizers.step()
            return
        self._update(buffers)
        state = self._optimizers.state
        stepped = [(number, flat) for number, flat in self._flat if flat.params[0].grad is not None]
        held = [list(alone) for alone in self._alone]
        try:
            for number, flat in stepped:
                flat.begin_step(state)
                held[number].append(flat.data)
            with self._optimizers.holding(held):
                self._optimizers.step()
        finally:
            for _, flat in stepped:
                flat.end_step(state)

    def _update(self, buffers: Sequence[torch.Tensor]) -> None:
        state = self._optimizers.state
        if len(buffers) != len(self._buffers) or not all(map(is_, buffers, self._buffers)):
            self._forget()
            self._buffers = list(buffers)
            possible = [(n, params) for n, params in enumerate(self._params) if self._possible[n]]
            members = sorted(((n, p) for n, params in possible for p in params), key=_address)
            for buffer in buffers:
                begin = bisect_left(members, buffer.data_ptr(), key=_address)
                end = bisect_left(members, buffer.data_ptr() + buffer.nbytes, key=_address)
                self._flat += _merge_neighbors(members[begin:end], buffer, state)
        else:
            stay = [flat.is_current(state) for _, flat in self._flat]
            if all(stay):
                return
            known, self._flat = self._flat, []
            for (number, flat), stays in zip(known, stay, strict=True):
                members = [(number, param) for param in flat.params]
                self._flat += [(number, flat)] if stays else _merge_neighbors(members, flat.buffer, state)
        merged = {param for _, flat in self._flat for param in flat.params}
        self._alone = [[param for param in params if param not in merged] for params in self._params]


class FlatParameter:
    """Parameters of equal dtype and device, each dense, in ascending order in ``buffer``, with equal state.

    The optimizer steps `data`, from the first parameter's first element to the last one's last, with gaps. Users still
    see each parameter's own state: views of the flat state, and scalars that are kept equal to the flat ones.
    """

    def __init__(self, params: Sequence[torch.Tensor], buffer: torch.Tensor, state: State) -> None:
        self.params = list(params)
        self.buffer = buffer
        addresses = [param.data_ptr() for param in params]
        self._offsets = [(address - addresses[0]) // buffer.itemsize for address in addresses]
        begin = (addresses[0] - buffer.data_ptr()) // buffer.itemsize
        self.data = buffer[begin : begin + self._offsets[-1] + self.params[-1].numel()]
        self._grad = torch.zeros_like(self.data)
        self._grads = self._views(self._grad)
        self._state: dict[str, torch.Tensor] = {}
        self._scalars: dict[str, tuple[torch.Tensor, int]] = {}  # one tensor for all parameters, and its version
        self._visible: list[int] = []  # addresses of the state that users see, in parameter order
        self._flatten_state(state)

    def is_current(self, state: Mapping[torch.Tensor, Any]) -> bool:
        """Whether all or none of the parameters have gradients, and their state is unchanged."""
        grads = [param.grad for param in self.params]
        missing = sum(grad is None for grad in grads)
        values = [value for param in self.params for value in state.get(param, {}).values()]
        try:
            visible = [*map(torch.Tensor.data_ptr, values)]
        except TypeError:  # not a tensor
            return False
        return (
            missing in (0, len(grads))
            and all(grad is None or grad.dtype == self.data.dtype for grad in grads)
            and visible == self._visible
            and all(values._version == version for values, version in self._scalars.values())
        )

    def begin_step(self, state: State) -> None:
        _torch.foreach_copy_(self._grads, [param.grad for param in self.params if param.grad is not None])
        self.data.grad = self._grad
        if self._state:
            state[self.data] = dict(self._state)

    def end_step(self, state: State) -> None:
        """After the optimizer's step, even a failed one: update each parameter's state from the flat one."""
        self.data.grad = None
        torch.autograd.graph.increment_version(self.params)
        stepped = state.pop(self.data, self._state)
        if stepped.keys() != self._state.keys() or not all(map(is_, stepped.values(), self._state.values())):
            self._expose_state(stepped, state)
            return
        for key, (values, _) in self._scalars.items():
            values.copy_(stepped[key])
            self._scalars[key] = (values, values._version)

    def _flatten_state(self, state: State) -> None:
        """Build the flat state from the parameters' own: equal scalars, and tensors of the parameters' shapes."""
        entries = [dict(state.get(param, {})) for param in self.params]
        flat: dict[str, torch.Tensor] = {}
        for key, value in entries[0].items():
            flat[key] = value.clone() if key in SCALAR_STATE else torch.zeros_like(self._grad, dtype=value.dtype)
        if not flat:
            return
        self._expose_state(flat, state)
        for key in flat.keys() - SCALAR_STATE:
            _torch.foreach_copy_([state[param][key] for param in self.params], [entry[key] for entry in entries])

    def _expose_state(self, flat: dict[str, torch.Tensor], state: State) -> None:
        """Give each parameter its part of the flat state, and remember it."""
        parts: dict[str, Sequence[torch.Tensor]] = {}
        self._state, self._scalars = flat, {}
        for key, value in flat.items():
            if key in SCALAR_STATE:
                values = value.expand(len(self.params)).clone()
                self._scalars[key] = (values, values._version)
                parts[key] = values.unbind()
            else:
                parts[key] = self._views(value)
        self._visible = []
        for index, param in enumerate(self.params):
            entry = {key: part[index] for key, part in parts.items()}
            self._visible.extend(value.data_ptr() for value in entry.values())
            if entry or param in state:
                state[param] = entry

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            _C.make_flat_view(flat, offset, param.detach().to(flat.dtype))
            for param, offset in zip(self.params, self._offsets, strict=True)
        ]


def _merge_neighbors(
    members: Sequence[tuple[int, torch.Tensor]], buffer: torch.Tensor, state: State
) -> list[tuple[int, FlatParameter]]:
    """Flat parameters of two or more neighbors each. ``members``: group number and parameter."""
    merged = []
    for (number, kind), alike in groupby(members, lambda member: (member[0], _merge_kind(member[1], buffer, state))):
        params = [param for _, param in alike]
        if kind is not None and len(params) > 1:
            merged.append((number, FlatParameter(params, buffer, state)))
    return merged


def _address(member: tuple[int, torch.Tensor]) -> int:
    return member[1].data_ptr()


def _merge_kind(param: torch.Tensor, buffer: torch.Tensor, state: Mapping[torch.Tensor, Any]) -> Hashable:
    """The properties that members of a flat parameter share; None if this one can only be stepped alone."""
    grad, entry = param.grad, state.get(param, {})
    # On the CPU the last elements of a 16-bit tensor are rounded more often than the others.
    exact = param.is_floating_point() and (param.itemsize >= 4 or param.device.type != "cpu")
    dense = param.is_contiguous() or param.is_contiguous(memory_format=torch.channels_last)
    plain = type(param) in (torch.Tensor, torch.nn.Parameter) and param.numel() < SMALL_NUMEL
    if not (plain and exact and dense and _lies_in(param, buffer)):
        return None
    if grad is not None and grad.dtype != param.dtype:
        return None
    values = [_state_kind(key, value, param) for key, value in entry.items()]
    return None if None in values else (grad is not None, *values)


def _state_kind(key: str, value: object, param: torch.Tensor) -> Hashable:
    """As `_merge_kind`, for one entry of the parameter's state."""
    if not isinstance(value, torch.Tensor):
        return None
    if key in SCALAR_STATE:
        return (key, value.dtype, value.device, value.item()) if value.dim() == 0 else None
    return (key, value.dtype) if value.shape == param.shape and value.device == param.device else None


def _lies_in(param: torch.Tensor, buffer: torch.Tensor) -> bool:
    begin = param.data_ptr() - buffer.data_ptr()
    inside = 0 <= begin and begin + param.numel() * param.itemsize <= buffer.numel() * buffer.itemsize
    return inside and param.dtype == buffer.dtype and param.device == buffer.device and begin % buffer.itemsize == 0
