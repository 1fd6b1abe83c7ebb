"""The models that are timed on a GPU. Each returns its loss from `forward`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.gpu.cases import GpuJob
from torchddp.harness.networks import GPT2_VOCABULARY, SMALL_NUMEL, Gpt, ManySmallTensors, ResNet

IMAGE_BATCH, IMAGE_SIDE = 64, 224
TEXT_BATCH = 8
# Two runs of the same step may sum in different orders. Under autocast, sums have about three significant digits.
FULL_PRECISION_TOLERANCE, AUTOCAST_TOLERANCE = 1e-4, 5e-2


def _resnet50(job: GpuJob) -> nn.Module:
    model = ResNet((1, 1), width=8, classes=10) if job.quick else ResNet()
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _images(job: GpuJob, generator: torch.Generator) -> Tensor:
    batch, side = (4, 32) if job.quick else (IMAGE_BATCH, IMAGE_SIDE)
    images = torch.randn(batch, 3, side, side, generator=generator)
    return images.contiguous(memory_format=torch.channels_last)


def _gpt2(job: GpuJob) -> nn.Module:
    if job.quick:
        return Gpt(vocabulary=256, width=64, depth=2, heads=2, max_length=job.sequence, tied=True)
    return Gpt(GPT2_VOCABULARY, width=768, depth=12, heads=12, max_length=job.sequence, tied=True)


def _tokens(job: GpuJob, generator: torch.Generator) -> Tensor:
    batch, vocabulary = (2, 256) if job.quick else (TEXT_BATCH, GPT2_VOCABULARY)
    # One more token than the model sees: each token but the first is a target.
    return torch.randint(0, vocabulary, (batch, job.sequence + 1), generator=generator)


@dataclass(frozen=True)
class GpuModel:
    """How to build a model and one batch for it."""

    title: str
    build: Callable[[GpuJob], nn.Module]
    make_batch: Callable[[GpuJob, torch.Generator], Tensor]
    autocast: bool

    @property
    def tolerance(self) -> float:
        """How much gradients of two runs may differ, relative to the largest element."""
        return AUTOCAST_TOLERANCE if self.autocast else FULL_PRECISION_TOLERANCE


MODELS: dict[str, GpuModel] = {
    "small": GpuModel(
        "1000 small tensors",
        lambda job: ManySmallTensors(),
        lambda job, generator: torch.randn(SMALL_NUMEL, generator=generator),
        autocast=False,
    ),
    "resnet50": GpuModel("ResNet-50-like, bf16 autocast", _resnet50, _images, autocast=True),
    "gpt2": GpuModel("GPT-2, bf16 autocast", _gpt2, _tokens, autocast=True),
}


def make_model(job: GpuJob, name: str) -> nn.Module:
    """A model with the same weights on every rank, still on the CPU."""
    torch.manual_seed(job.seed)
    return MODELS[name].build(job)


def make_batch(job: GpuJob, name: str, rank: int, index: int) -> Tensor:
    """Batch `index` of a rank. Ranks get different data, so that missing averages show."""
    generator = torch.Generator().manual_seed(job.seed + 1000 * rank + index)
    return MODELS[name].make_batch(job, generator)
