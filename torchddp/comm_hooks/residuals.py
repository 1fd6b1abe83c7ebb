"""What compression has left out so far, kept by parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from torchddp.comm_hooks.layout import Layout

__all__ = ["Residuals"]


class Residuals:
    """Error feedback: fp32 memory laid out as the buckets are, moved when the buckets change.

    A rank holds all of a bucket's residual, or a part of it where ranks share the work. In a state dict it is by
    name, in the parameter's shape, with zeros in what other ranks hold.
    """

    def __init__(self) -> None:
        self._flats: dict[tuple[Layout, int, int], Tensor] = {}
        # By parameter: the part of it that is held, flat, and where in the parameter that begins.
        self._parts: dict[str, tuple[Tensor, int]] = {}

    def of(
        self, layout: Layout, like: Tensor, begin: int, end: int, add_parts: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Elements [begin, end) of the residual of these parameters: fp32 [end - begin], to be updated in place.

        Args:
            add_parts: sums a tensor over the ranks that hold parts; collective, and called by all ranks or none. None:
                each rank holds all.
        """
        key = (layout, begin, end)
        if key not in self._flats:
            # With some room to spare: of a gradient's exact size it could take shared memory that awaits the gradient.
            flat = torch.zeros(end - begin + 16, dtype=torch.float32, device=like.device)[: end - begin]
            if any(slot.name in self._parts for slot in layout.slots):
                flat[: max(0, layout.numel - begin)] = self._collect(layout, like, add_parts)[begin:end]
            self._forget(layout)
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
                begin = slot.offset + first
                whole[begin : begin + held.numel()] = held
        if add_parts is not None:
            add_parts(whole)
        return whole

    def _forget(self, layout: Layout) -> None:
        names = {slot.name for slot in layout.slots}
        gone = [key for key in self._flats if any(slot.name in names for slot in key[0].slots)]
        for key in gone:
            del self._flats[key]

    def state_dict(self, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Copies by parameter name, fp32, in the parameter's shape."""
        state = {}
        for name, (held, first) in self._parts.items():
            whole = torch.zeros(shapes[name].numel(), dtype=torch.float32, device=held.device)
            whole[first : first + held.numel()] = held
            state[name] = whole.view(shapes[name])
        return state

    def restart(
        self, shapes: Mapping[str, torch.Size], device: torch.device | None, more: Residuals | None = None
    ) -> None:
        """Among other ranks: the same memory by name, zeros for what there is none of, so that all ranks have all.

        ``more``: to be added to it.
        """
        state = {name: torch.zeros(shape, dtype=torch.float32, device=device) for name, shape in shapes.items()}
        for residuals in (self, more):
            for name, held in (residuals.state_dict(shapes) if residuals is not None else {}).items():
                state[name] += held
        self.load_state_dict(state, device)

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device | None = None) -> None:
        """Go on from a :meth:`state_dict`, of whatever buckets."""
        self._flats.clear()
        self._parts = {n: (t.detach().to(device, torch.float32, copy=True).reshape(-1), 0) for n, t in state.items()}
