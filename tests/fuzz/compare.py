"""Compares the visible state of two sides after the same operation and finds the first difference."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

Named = dict[str, Tensor | None]
SUMS = 50.0


@dataclass(frozen=True)
class Difference:
    """The first point at which ours differs."""

    rank: int
    step: int
    op: str
    kind: str  # "gradient", "parameter", ..., "exception", "end"
    name: str
    want: str
    got: str

    def text(self) -> str:
        where = f"rank {self.rank}, step {self.step}, after {self.op}"
        return f"{where}: {self.kind} {self.name}: torch's class {self.want}; ours {self.got}"


@dataclass(frozen=True)
class Strictness:
    """What is compared, and how closely."""

    tolerance: float = 0.0  # relative to the largest element, or to one; 0: bitwise
    strides: bool = True
    kept: bool = True  # the gradients that a program keeps
    values: bool = True  # anything but exceptions


@dataclass(frozen=True)
class Raised:
    """An exception, without its frames, which would keep objects alive."""

    types: tuple[str, ...]  # its MRO, starting with its own type
    message: str
    traceback: str

    def __str__(self) -> str:
        return f"raises {self.types[0]}: {self.message[:300]}"


def exceptions_differ(theirs: Raised | None, ours: Raised | None) -> bool:
    """Code that catches torch's exception must catch ours."""
    if theirs is None or ours is None:
        return theirs is not ours
    return theirs.types[0] not in ours.types


def first_difference(
    theirs: dict[str, Named], ours: dict[str, Named], strictness: Strictness
) -> tuple[str, str, str, str] | None:
    """(kind, name, what torch's class has, what ours has), or None."""
    for kind, want in theirs.items():
        got = ours[kind]
        if kind == "kept gradient" and not strictness.kept:
            continue
        if want.keys() != got.keys():
            only_theirs, only_ours = sorted(want.keys() - got.keys()), sorted(got.keys() - want.keys())
            return kind, "names", f"also has {only_theirs}", f"also has {only_ours}"
        closely = strictness
        if kind == "seen":  # losses are sums over all elements, whose errors add up
            closely = replace(strictness, tolerance=SUMS * strictness.tolerance)
        for name, value in want.items():
            words = tensors_differ(value, got[name], closely)
            if words is not None:
                return kind, name, *words
    return None


def tensors_differ(want: Tensor | None, got: Tensor | None, strictness: Strictness) -> tuple[str, str] | None:
    """Describe both tensors where they differ, or return None."""
    described = _describe(want, strictness.strides), _describe(got, strictness.strides)
    if want is None or got is None or described[0] != described[1]:
        return described if described[0] != described[1] else None
    want, got = want.detach().resolve_conj(), got.detach().resolve_conj()
    if want.is_sparse:
        want, got = want.to_dense(), got.to_dense()
    if torch.equal(want, got):
        return None
    if want.is_complex():
        want, got = torch.view_as_real(want), torch.view_as_real(got)
    wrong = (want != got) & ~(want.isnan() & got.isnan())
    if strictness.tolerance and want.is_floating_point():
        largest = want[want.isfinite()].abs().max().item() if want.isfinite().any() else 0.0
        wrong &= ~((want.double() - got.double()).abs() <= strictness.tolerance * max(1.0, largest))
    if not wrong.any():
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    count = f"{int(wrong.sum())} of {want.numel()} elements, first {list(at)}"
    return f"{want[at].item()!r} ({count})", f"{got[at].item()!r}"


def _describe(value: Tensor | None, strides: bool) -> str:
    """Everything about a tensor except its values."""
    if value is None:
        return "None"
    words = f"{str(value.dtype)[6:]} {tuple(value.shape)}"
    if value.is_sparse:
        return f"{words} sparse"
    if strides and value.numel() > 1 and not value.is_contiguous():
        words += f" strides {tuple(s for s, size in zip(value.stride(), value.shape, strict=True) if size > 1)}"
    return words + (" requires_grad" if value.requires_grad else "")
