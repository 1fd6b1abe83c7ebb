"""Offsets of gradients in a bucket's flat memory, and residuals of their compression."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from torchddp import _torch
from torchddp.errors import listed


@dataclass(frozen=True)
class Slot:
    name: str
    offset: int
    shape: tuple[int, ...]
    numel: int

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Layout:
    """The slots in ``numel`` elements of flat memory, ascending, perhaps with padding between them."""

    slots: tuple[Slot, ...]
    numel: int
    gaps: tuple[tuple[int, int], ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        gaps, end = [], 0
        for slot in self.slots:
            if slot.offset < end:
                raise ValueError(f"{slot.name} begins at {slot.offset}, before the end of the previous slot, {end}")
            if slot.offset > end:
                gaps.append((end, slot.offset))
            end = slot.end
        if end > self.numel:
            raise ValueError(f"slots take {end} elements of {self.numel}")
        if end < self.numel:
            gaps.append((end, self.numel))
        object.__setattr__(self, "gaps", tuple(gaps))

    @classmethod
    def packed(cls, slots: Sequence[Slot]) -> Layout:
        *offsets, end = accumulate((slot.numel for slot in slots), initial=0)
        return cls(tuple(replace(slot, offset=offset) for slot, offset in zip(slots, offsets, strict=True)), end)

    def names(self) -> str:
        return listed([slot.name for slot in self.slots])

    def clear_gaps(self, flat: Tensor, begin: int = 0) -> None:
        """Zero the padding in ``flat`` (elements from ``begin`` on), because compressors write to it."""
        gaps = [flat[max(first - begin, 0) : max(last - begin, 0)] for first, last in self.gaps]
        _torch.foreach_zero_([*gaps, flat[max(self.numel - begin, 0) :]])


@dataclass(frozen=True)
class Piece:
    """Gradients that one hook reduces together: fp32 [layout.numel], overwritten by the averages."""

    layout: Layout
    flat: Tensor
    step: int

    def slot(self, slot: Slot) -> Tensor:
        return self.flat[slot.offset : slot.end]


def layout_of(bucket: torch.distributed.GradBucket, names: dict[int, str]) -> Layout:
    flat = bucket.buffer()
    slots = []
    for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if id(param) not in names:
            raise RuntimeError(
                f"bucket {bucket.index()} holds a parameter of shape {tuple(param.shape)} that was not in the model "
                "when the communication hook was attached: register a new hook after changing the model"
            )
        offset = int(grad.storage_offset() - flat.storage_offset())
        slots.append(Slot(names[id(param)], offset, tuple(param.shape), int(param.numel())))
    return Layout(tuple(sorted(slots, key=lambda slot: slot.offset)), flat.numel())


class Residuals:
    """Error feedback: fp32 memory laid out as the buckets are, moved when the buckets change.

    A rank holds all of a bucket's residual, or a part of it. State dicts have it by name, in the parameter's shape.
    """

    def __init__(self) -> None:
        self._flats: dict[tuple[Layout, int, int], Tensor] = {}
        # By parameter: the part that this rank holds, flat, and its offset in the parameter.
        self._parts: dict[str, tuple[Tensor, int]] = {}

    def of(
        self, layout: Layout, like: Tensor, begin: int, end: int, add_parts: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Elements [begin, end) of the residual of these parameters: fp32 [end - begin], to be updated in place.

        ``add_parts``: collective; sums a tensor over the ranks that hold parts. None: each rank holds all.
        """
        key = (layout, begin, end)
        if key not in self._flats:
            # Slightly larger: at a gradient's exact size it might take shared memory reserved for that.
            flat = torch.zeros(end - begin + 16, dtype=torch.float32, device=like.device)[: end - begin]
            if any(slot.name in self._parts for slot in layout.slots):
                flat[: max(0, layout.numel - begin)] = self._collect(layout, like, add_parts)[begin:end]
            names = {slot.name for slot in layout.slots}  # which leave the buckets that they were in
            self._flats = {k: f for k, f in self._flats.items() if not any(s.name in names for s in k[0].slots)}
            self._flats[key] = flat
            for slot in layout.slots:
                first = min(max(slot.offset, begin), slot.end)
                last = max(min(slot.end, end), first)
                part = flat[first - begin : last - begin] if last > first else flat[:0]
                self._parts[slot.name] = (part, first - slot.offset)
        held = self._flats[key]
        layout.clear_gaps(held, begin)
        return held

    def _collect(self, layout: Layout, like: Tensor, add_parts: Callable[[Tensor], None] | None) -> Tensor:
        whole = torch.zeros(layout.numel, dtype=torch.float32, device=like.device)
        for slot in layout.slots:
            if slot.name in self._parts:
                held, first = self._parts[slot.name]
                if not held.is_cpu:  # of the stream that loaded it
                    held.record_stream(torch.accelerator.current_stream(held.device))
                begin = slot.offset + first
                whole[begin : begin + held.numel()] = held
        if add_parts is not None:
            add_parts(whole)
        return whole

    def state_dict(self, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Copies by parameter name, fp32, in the parameter's shape."""
        state = {}
        for name, (held, first) in self._parts.items():
            whole = torch.zeros(shapes[name].numel(), dtype=torch.float32, device=held.device)
            whole[first : first + held.numel()] = held
            state[name] = whole.view(shapes[name])
        return state

    def restart(self, shapes: Mapping[str, torch.Size], device: torch.device | None, more: Residuals) -> None:
        """For a new set of ranks: each holds whole parameters' residuals by name, with ``more`` added, or zeros."""
        state = {name: torch.zeros(shape, dtype=torch.float32, device=device) for name, shape in shapes.items()}
        for residuals in (self, more):
            for name, held in residuals.state_dict(shapes).items():
                state[name] += held
        self.load_state_dict(state, device)

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device | None = None) -> None:
        """Continue from a :meth:`state_dict`, whatever buckets it had."""
        self._flats.clear()
        self._parts = {n: (t.detach().to(device, torch.float32, copy=True).reshape(-1), 0) for n, t in state.items()}


def check_names(state: Mapping[str, Tensor], shapes: Mapping[str, Any], what: str = "the parameter") -> None:
    """ValueError unless each tensor belongs to a parameter, and has its shape."""
    for name, value in state.items():
        if name not in shapes:
            raise ValueError(f"the state has parameter {name!r}, which the model does not have (or does not train)")
        if value.shape != shapes[name]:
            raise ValueError(f"the state of {name!r} has shape {tuple(value.shape)}, {what} {tuple(shapes[name])}")
