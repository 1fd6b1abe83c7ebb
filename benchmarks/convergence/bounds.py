"""The methods, and how far each may exceed the uncompressed loss. Pure."""

from __future__ import annotations

from dataclasses import dataclass

REFERENCE = "uncompressed"


@dataclass(frozen=True)
class Bound:
    """The upper bound on a method's final held-out loss over the reference's; None: reported without a bound."""

    method: str
    at_most: float | None = None
    reason: str = ""


_CAST = "a rounded gradient is off by far less than the noise of a batch"
_LOW_RANK = "what a low rank leaves out stays in the residual and is applied some steps later"
_LOCAL = "ranks diverge between outer steps"

BOUNDS = (
    Bound(REFERENCE),
    Bound("fp16", 1.01, _CAST),
    Bound("bf16", 1.01, _CAST),
    Bound("int8", 1.01, "a step's error is below 1/250 of a block's largest value, and is fed back"),
    Bound("int4"),
    Bound("powersgd", 1.03, _LOW_RANK),
    Bound("powersgd-8", 1.03, _LOW_RANK),
    Bound("powersgd-16", 1.03, _LOW_RANK),
    Bound("diloco", 1.03, _LOCAL),
    Bound("streaming-diloco", 1.03, _LOCAL),
    Bound("torch-powersgd"),
)
NAMES = tuple(bound.method for bound in BOUNDS)


def bound_of(method: str) -> Bound:
    """The bound for this method."""
    return next(bound for bound in BOUNDS if bound.method == method)
