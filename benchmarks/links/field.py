"""The variants: torch's class, and ours by default, with every bucket size, and with planned buckets. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from torchddp.bench.cases import Case
from torchddp.harness.variants import LOCAL, TORCH_DDP, TORCHDDP, Role, Variant

LOCALHOST = "one host"
CASE = Case(
    name="links",
    title="planned buckets compared with every bucket size, over links of several rates",
    models=("mlp", "conv", "gpt", "small"),
    quick_models=("conv",),
    default_world_size=2,
    unit="ms",
)
SWEPT_CAPS_MB: tuple[float, ...] = (0.25, 0.5, 1, 2, 5, 10, 25, 50, 100)
TORCH_DEFAULT, OUR_DEFAULT, PLANNED = "torch default", "torchddp default", "torchddp auto"


def make_field(caps_mb: Sequence[float]) -> tuple[Variant, ...]:
    """The variants; planned buckets come last."""
    swept = [Variant(f"torchddp, cap {cap:g}", Role.OURS, TORCHDDP, (("bucket_cap_mb", cap),)) for cap in caps_mb]
    return (
        LOCAL,
        Variant(TORCH_DEFAULT, Role.TORCH, TORCH_DDP),
        Variant(OUR_DEFAULT, Role.OURS, TORCHDDP),
        *swept,
        Variant(PLANNED, Role.OURS, TORCHDDP, (("bucket_cap_mb", "auto"),)),
    )
