"""The variants: wrappers with their optimizers, all AdamW. Pure."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass

from torchddp.harness.variants import TORCH_DDP, TORCHDDP, ArgumentError, Role, Variant

SHARDED = "torchddp.ShardedDataParallel"
FSDP2 = "torch.distributed.fsdp.FSDPModule"
FAIRSCALE = "fairscale.nn.data_parallel.ShardedDataParallel"
DEEPSPEED = "deepspeed.DeepSpeedEngine"

# The kinds of training step; `builders.BUILDERS` has a function for each.
PLAIN, ZERO, FULLY_SHARDED, SHARDED_BY_US, FAIRSCALE_KIND, DEEPSPEED_KIND = (
    "ddp",
    "ddp + ZeroRedundancyOptimizer",
    "fully_shard",
    "OSS + torchddp.ShardedDataParallel",
    "fairscale",
    "deepspeed",
)


@dataclass(frozen=True)
class Entry:
    """A variant: its class wraps the model; its options are those of the optimizer and the wrapper."""

    variant: Variant
    kind: str
    what: str


def _entry(name: str, role: Role, class_path: str, kind: str, what: str, **options: object) -> Entry:
    return Entry(Variant(name, role, class_path, tuple(options.items())), kind, what)


_ENTRIES = (
    _entry("torch-ddp", Role.TORCH, TORCH_DDP, PLAIN, "torch DDP, AdamW; the others must train like it"),
    _entry("torch-ddp-fused", Role.TORCH, TORCH_DDP, PLAIN, "torch DDP, fused AdamW", fused=True),
    _entry("torch-zero", Role.TORCH, TORCH_DDP, ZERO, "torch DDP, ZeroRedundancyOptimizer with default options"),
    _entry("torch-zero-view", Role.TORCH, TORCH_DDP, ZERO, "the same, bucket views", parameters_as_bucket_view=True),
    _entry("torch-zero-fused", Role.TORCH, TORCH_DDP, ZERO, "the same, fused AdamW", fused=True),
    _entry(
        "torch-zero-both",
        Role.TORCH,
        TORCH_DDP,
        ZERO,
        "the same, bucket views and fused AdamW",
        parameters_as_bucket_view=True,
        fused=True,
    ),
    _entry("fsdp2", Role.TORCH, FSDP2, FULLY_SHARDED, "torch fully_shard per block and root, fused AdamW", fused=True),
    _entry("fairscale", Role.PEER, FAIRSCALE, FAIRSCALE_KIND, "fairscale OSS and ShardedDataParallel, AdamW"),
    _entry("fairscale-fused", Role.PEER, FAIRSCALE, FAIRSCALE_KIND, "the same, fused AdamW", fused=True),
    _entry("deepspeed", Role.PEER, DEEPSPEED, DEEPSPEED_KIND, "deepspeed ZeRO stage 2, fused AdamW", fused=True),
    _entry("torchddp-ddp", Role.OURS, TORCHDDP, PLAIN, "torchddp DDP, fused AdamW", fused=True),
    _entry(
        "torchddp-auto",
        Role.OURS,
        SHARDED,
        SHARDED_BY_US,
        "OSS and ShardedDataParallel, shared memory, fused AdamW",
        transport="auto",
        fused=True,
    ),
    _entry(
        "torchddp-c10d",
        Role.OURS,
        SHARDED,
        SHARDED_BY_US,
        "the same, through gloo",
        transport="c10d",
        fused=True,
    ),
    _entry("torchddp-plain", Role.OURS, SHARDED, SHARDED_BY_US, "OSS and ShardedDataParallel with default options"),
)
FIELD: dict[str, Entry] = {entry.variant.name: entry for entry in _ENTRIES}
REFERENCE = "torch-ddp"
PACKAGES = ("fairscale", "deepspeed")


def choose_variants(names: Iterable[str]) -> tuple[Variant, ...]:
    """The named variants and the reference, in order; all if no names are given. ArgumentError for unknown names."""
    chosen = set(names) or set(FIELD)
    for name in sorted(chosen - set(FIELD)):
        raise ArgumentError(f"--variants: there is no '{name}'; choose from {', '.join(FIELD)}.")
    return tuple(entry.variant for name, entry in FIELD.items() if name in chosen | {REFERENCE})


def missing_package(variant: Variant) -> str | None:
    """The package of a variant's class if it is not installed, else None."""
    assert variant.class_path is not None
    package = variant.class_path.partition(".")[0]
    return package if importlib.util.find_spec(package) is None else None
