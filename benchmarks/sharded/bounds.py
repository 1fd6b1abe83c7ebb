"""The comparisons between configurations, and the bound on each ratio. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

ZERO_FORMS = ("torch-zero", "torch-zero-view", "torch-zero-fused", "torch-zero-both")
FAIRSCALE_FORMS = ("fairscale", "fairscale-fused")


@dataclass(frozen=True)
class Comparison:
    """Our step time over that of the fastest of `opponents`; at most `bound`, for this `reason`."""

    ours: str
    against: str
    opponents: tuple[str, ...]
    bound: float | None = None
    reason: str = ""

    def fastest(self, medians: Mapping[str, float]) -> str | None:
        """The opponent with the lowest median in this run; None if none ran."""
        ran = [name for name in self.opponents if name in medians]
        return min(ran, key=lambda name: medians[name]) if ran else None


COMPARISONS = (
    Comparison(
        "torchddp-auto",
        "ZeRO, default",
        ("torch-zero",),
        0.45,
        "it sends all gradients and then all parameters over TCP, and its AdamW reads memory several times",
    ),
    Comparison("torchddp-auto", "ZeRO, best", ZERO_FORMS),
    Comparison(
        "torchddp-auto",
        "fairscale, default",
        ("fairscale",),
        0.40,
        "it reduces and broadcasts parameter by parameter or in copies, over TCP",
    ),
    Comparison("torchddp-auto", "fairscale, best", FAIRSCALE_FORMS),
    Comparison(
        "torchddp-auto",
        "deepspeed",
        ("deepspeed",),
        0.30,
        "besides using TCP, it copies gradients and weights to flat memory and back, from Python",
    ),
    Comparison("torchddp-auto", "FSDP2", ("fsdp2",)),
    Comparison(
        "torchddp-auto",
        "torch DDP, fused",
        ("torch-ddp-fused",),
        0.80,
        "sharding must not lose the speed of shared memory, as each rank updates only its share",
    ),
    Comparison("torchddp-auto", "torchddp DDP, fused", ("torchddp-ddp",)),
    Comparison(
        "torchddp-c10d",
        "ZeRO, best",
        ZERO_FORMS,
        0.90,
        "over gloo too, a gradient is sent only to its owner, which is half the bytes of an all-reduce",
    ),
    Comparison("torchddp-c10d", "ZeRO, default", ("torch-zero",)),
    Comparison("torchddp-c10d", "fairscale, best", FAIRSCALE_FORMS),
    Comparison("torchddp-c10d", "deepspeed", ("deepspeed",)),
    Comparison("torchddp-c10d", "torch DDP, fused", ("torch-ddp-fused",)),
    Comparison("torchddp-plain", "ZeRO, default", ("torch-zero",)),
    Comparison("torchddp-plain", "fairscale, default", ("fairscale",)),
    Comparison("torchddp-plain", "torch DDP, AdamW", ("torch-ddp",)),
)


def comparisons_of(names: Collection[str]) -> list[Comparison]:
    """The comparisons between variants that ran."""
    return [c for c in COMPARISONS if c.ours in names and any(opponent in names for opponent in c.opponents)]
