"""What is measured on a GPU: the cases and the settings of one launch. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from torchddp.bench.cases import Case, Job

MODELS_CASE = Case(
    name="gpu",
    title="cost on a GPU (DDP step minus the same step without DDP, forward and backward)",
    models=("small", "resnet50", "gpt2"),
    quick_models=("small", "resnet50", "gpt2"),
    default_world_size=1,
    unit="ms",
    goal_ratio=0.3,
)
PACK_CASE = "gpu_pack"
# Of the bandwidth of a plain copy on the same device in the same run.
PACK_GOAL = 0.9
PARTS = ("models", "pack")
MIB = 1024 * 1024
PACK_BYTES = (25 * MIB, 100 * MIB, 1024 * MIB)
QUICK_PACK_BYTES = (1 * MIB,)


@dataclass(frozen=True)
class GpuJob(Job):
    """One launch on one kind of device. Picklable."""

    device: str = "cuda"
    parts: tuple[str, ...] = PARTS
    # Small models in place of the real ones.
    quick: bool = False
    # Tokens of a sequence of gpt2.
    sequence: int = 1024
    pack_bytes: tuple[int, ...] = PACK_BYTES
