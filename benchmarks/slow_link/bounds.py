"""The methods, their comparisons, and the speed-ups that we require. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.slow_link.job import TARGET_METHOD

TORCH_DDP = (TARGET_METHOD, "torch-ddp-5")
NAMES = (
    *TORCH_DDP,
    "torch-fp16",
    "torch-powersgd",
    "exact",
    "wire-bf16",
    "int8",
    "powersgd",
    "diloco",
)


@dataclass(frozen=True)
class Comparison:
    """Seconds to the target loss of the fastest of `theirs`, over those of the fastest of `ours`; at least `bound`."""

    title: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    bound: float
    reason: str


COMPARISONS = (
    Comparison(
        "exact / torch DDP", ("exact",), TORCH_DDP, 1.2, "each byte crosses the link once, not one and a half times"
    ),
    Comparison("bf16 / torch DDP", ("wire-bf16",), TORCH_DDP, 1.8, "half as many bytes cross the link"),
    Comparison("int8 / torch DDP", ("int8",), TORCH_DDP, 2.5, "a quarter as many bytes cross the link"),
    Comparison(
        "PowerSGD or DiLoCo / torch DDP",
        ("powersgd", "diloco"),
        TORCH_DDP,
        10.0,
        "little is left to send, so computation dominates",
    ),
    Comparison(
        "PowerSGD / torch's PowerSGD",
        ("powersgd",),
        ("torch-powersgd",),
        1.0,
        "our version of the method must not be slower",
    ),
)


def fastest(names: tuple[str, ...], seconds: Mapping[str, float]) -> str | None:
    """The fastest method that reached the loss; None if none did."""
    arrived = [name for name in names if name in seconds]
    return min(arrived, key=lambda name: seconds[name]) if arrived else None


def judge(seconds: Mapping[str, float], ran: tuple[str, ...]) -> list[dict[str, object]]:
    """Each comparison between methods that ran. A bound fails if none of ours reached the loss."""
    found: list[dict[str, object]] = []
    for comparison in COMPARISONS:
        if not set(comparison.ours) & set(ran) or not set(comparison.theirs) & set(ran):
            continue
        ours, theirs = fastest(comparison.ours, seconds), fastest(comparison.theirs, seconds)
        ratio = seconds[theirs] / seconds[ours] if ours and theirs else None
        found.append(
            {
                "title": comparison.title,
                "ours": ours,
                "theirs": theirs,
                "ratio": ratio,
                "bound": comparison.bound,
                "reason": comparison.reason,
                "holds": ours is not None and (ratio is None or ratio >= comparison.bound),
            }
        )
    return found
