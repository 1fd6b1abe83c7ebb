"""Where the gradients of a bucket lie in its flat memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Layout", "Piece", "Slot", "layout_of"]


@dataclass(frozen=True)
class Slot:
    """A parameter's place in flat memory, in elements."""

    name: str
    offset: int
    shape: tuple[int, ...]
    numel: int

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Layout:
    """The slots of flat memory of ``numel`` elements, ascending; between them there may be padding."""

    slots: tuple[Slot, ...]
    numel: int
    gaps: tuple[tuple[int, int], ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        gaps, end = [], 0
        for slot in self.slots:
            if slot.offset < end:
                raise ValueError(
                    f"{slot.name} begins at {slot.offset}, before the end of the slot in front of it, {end}"
                )
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
        """The same parameters one after the other."""
        packed, end = [], 0
        for slot in slots:
            packed.append(Slot(slot.name, end, slot.shape, slot.numel))
            end += slot.numel
        return cls(tuple(packed), end)

    def names(self) -> str:
        """For messages; the first few if there are many."""
        names = [slot.name for slot in self.slots]
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    def clear_gaps(self, flat: Tensor, begin: int = 0) -> None:
        """What belongs to no parameter to zero: compressors write to it, and the next step would send that.

        ``flat``: elements from ``begin`` on, and perhaps more behind the end.
        """
        for first, last in self.gaps:
            flat[max(first - begin, 0) : max(last - begin, 0)].zero_()
        flat[max(self.numel - begin, 0) :].zero_()


@dataclass(frozen=True)
class Piece:
    """Gradients that one hook reduces together: fp32 [layout.numel], overwritten by the averages."""

    layout: Layout
    flat: Tensor
    step: int

    def slot(self, slot: Slot) -> Tensor:
        return self.flat[slot.offset : slot.end]


def layout_of(bucket: torch.distributed.GradBucket, names: dict[int, str]) -> Layout:
    """The layout of a bucket; ``names``: by id of the parameter."""
    flat = bucket.buffer()
    slots = []
    for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
        if id(param) not in names:
            raise RuntimeError(
                f"bucket {bucket.index()} holds a parameter of shape {tuple(param.shape)} that was not in the model "
                "when the communication hook was attached: register a new hook after the model was changed"
            )
        offset = int(grad.storage_offset() - flat.storage_offset())
        slots.append(Slot(names[id(param)], offset, tuple(param.shape), int(param.numel())))
    return Layout(tuple(sorted(slots, key=lambda slot: slot.offset)), flat.numel())
