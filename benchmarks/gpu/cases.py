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


@dataclass(frozen=True)
class GpuJob(Job):
    """One launch on one kind of device. Picklable."""

    device: str = "cuda"
    # Small models in place of the real ones.
    quick: bool = False
    # Tokens of a sequence of gpt2.
    sequence: int = 1024
