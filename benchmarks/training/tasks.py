"""The training tasks: the demo's GPT on real text, and a classifier of scikit-learn's digits.

A batch is a pure function of (seed, step, rank), so that every method sees the same data in the same order.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.gpt.config import TrainConfig, lr_factor
from examples.gpt.data import Batch, Corpus, batch_offsets, load_corpus, validation_offsets, windows_at
from examples.gpt.model import GPT

CPU = torch.device("cpu")
DIGITS_PIXELS, DIGITS_CLASSES = 64, 10
# Held out of the 1,797 digits, in an order independent of the run's seed.
DIGITS_HELD_OUT = 360
DIGITS_SPLIT_SEED = 1797
# Without it the loss becomes so small that a single held-out digit changes it by several percent.
LABEL_SMOOTHING = 0.1


@dataclass(frozen=True)
class OuterSteps:
    """Settings of DiLoCo. `wire` is for the method without fragments; the one with fragments uses its paper's.

    The paper's outer learning rate and momentum, 0.7 and 0.9, are for long runs from trained weights. In a run of a
    dozen outer steps from random weights, that much momentum has not yet taken effect when the run ends.
    """

    sync_every: int
    lr: float
    momentum: float
    wire: str


@dataclass(frozen=True)
class Task(abc.ABC):
    """Model, data and optimizer of one training run; the batch size is per rank."""

    name: str
    title: str
    # The unit of `batch_size` times `sample_units`.
    unit: str
    steps: int
    batch_size: int
    lr: float
    schedule: str
    warmup_steps: int
    # Consecutive steps of one method, after which ranks of local methods have the same model and the loss is evaluated.
    slice_steps: int
    outer: OuterSteps
    # A method is stopped after this many times `steps` if it has not reached the reference's loss.
    patience: int

    @property
    def sample_units(self) -> int:
        """Tokens per sample, or 1 if samples are not sequences."""
        return 1

    @property
    def lr_config(self) -> TrainConfig:
        """The configuration for the demo's schedule."""
        return TrainConfig(steps=self.steps, lr=self.lr, schedule=self.schedule, warmup_steps=self.warmup_steps)

    def lr_at(self, step: int) -> float:
        """The learning rate of a 0-based step."""
        return self.lr * lr_factor(step, self.lr_config)

    @abc.abstractmethod
    def make_model(self, seed: int) -> nn.Module:
        """A model with the same weights for the same seed; called with inputs and targets, it returns the mean loss."""

    @abc.abstractmethod
    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """This task's optimizer, with its learning rate; the caller applies `lr_at`."""

    @abc.abstractmethod
    def batch(self, seed: int, step: int, rank: int, world_size: int) -> Batch:
        """Inputs and targets."""

    @abc.abstractmethod
    def held_out(self, rank: int, world_size: int) -> list[Batch]:
        """This rank's part of the fixed evaluation set. Every rank has equally many batches of the same size."""


@dataclass(frozen=True)
class GPTTask(Task):
    """Predicts the next byte of Python's own source files."""

    block_size: int
    layers: int
    width: int
    heads: int
    eval_windows: int

    @property
    def sample_units(self) -> int:
        return self.block_size

    @cached_property
    def corpus(self) -> Corpus:
        """The text, read once per process."""
        return load_corpus(None, self.block_size)

    def make_model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return GPT(block_size=self.block_size, layers=self.layers, width=self.width, heads=self.heads)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def batch(self, seed: int, step: int, rank: int, world_size: int) -> Batch:
        text = self.corpus.train
        offsets = batch_offsets(
            seed=seed,
            index=step,
            rank=rank,
            world_size=world_size,
            batch_size=self.batch_size,
            choices=text.numel() - self.block_size,
        )
        return windows_at(text, offsets, self.block_size, CPU)

    def held_out(self, rank: int, world_size: int) -> list[Batch]:
        text = self.corpus.validation
        windows = self.eval_windows // world_size * world_size
        offsets = validation_offsets(size_bytes=text.numel(), block_size=self.block_size, windows=windows)
        return [windows_at(text, offsets[rank::world_size], self.block_size, CPU)]


class DigitsClassifier(nn.Module):
    """A perceptron with two hidden layers; `forward` returns the mean cross entropy with smoothed labels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(DIGITS_PIXELS, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, DIGITS_CLASSES),
        )

    def forward(self, pixels: Tensor, classes: Tensor) -> Tensor:
        """`pixels` are (batch, 64) in [0, 1], `classes` (batch) of 0 to 9."""
        return F.cross_entropy(self.layers(pixels), classes, label_smoothing=LABEL_SMOOTHING)


@dataclass(frozen=True)
class DigitsTask(Task):
    """Ten classes of handwritten digits, 8 x 8 pixels."""

    width: int

    @cached_property
    def data(self) -> tuple[Tensor, Tensor]:
        """Pixels and classes, in a fixed shuffled order; the last ones are held out."""
        from sklearn.datasets import load_digits  # scikit-learn is needed for this task only

        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(DIGITS_SPLIT_SEED))
        pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
        return pixels[order], torch.tensor(digits.target, dtype=torch.long)[order]

    def make_model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return DigitsClassifier(self.width)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=0.1, fused=True)

    def batch(self, seed: int, step: int, rank: int, world_size: int) -> Batch:
        pixels, classes = self.data
        chosen = batch_offsets(
            seed=seed,
            index=step,
            rank=rank,
            world_size=world_size,
            batch_size=self.batch_size,
            choices=len(classes) - DIGITS_HELD_OUT,
        )
        return pixels[chosen], classes[chosen]

    def held_out(self, rank: int, world_size: int) -> list[Batch]:
        pixels, classes = self.data
        size = DIGITS_HELD_OUT // world_size * world_size
        return [(pixels[-size:][rank::world_size], classes[-size:][rank::world_size])]


LONG_OUTER_STEPS = OuterSteps(sync_every=50, lr=0.9, momentum=0.5, wire="fp32")


def gpt_for_one_host() -> GPTTask:
    """Small enough for a few hundred steps in ten seconds on one core."""
    return GPTTask(
        name="gpt",
        title="GPT on Python's source files",
        unit="tokens",
        steps=800,
        batch_size=8,
        lr=3e-3,
        schedule="cosine",
        warmup_steps=30,
        slice_steps=50,
        outer=LONG_OUTER_STEPS,
        patience=1,
        block_size=64,
        layers=2,
        width=64,
        heads=4,
        eval_windows=256,
    )


def gpt_for_a_slow_link() -> GPTTask:
    """A few million parameters and a batch so small that a 100 Mbit/s link dominates the step time."""
    return GPTTask(
        name="wide-gpt",
        title="GPT on Python's source files",
        unit="tokens",
        steps=50,
        batch_size=2,
        lr=1e-3,
        schedule="constant",
        warmup_steps=5,
        slice_steps=10,
        outer=OuterSteps(sync_every=10, lr=1.0, momentum=0.0, wire="int8"),
        patience=4,
        block_size=32,
        layers=4,
        width=256,
        heads=4,
        eval_windows=128,
    )


def digits() -> DigitsTask:
    """A perceptron for the digits."""
    return DigitsTask(
        name="digits",
        title="perceptron on scikit-learn's digits",
        unit="samples",
        steps=600,
        batch_size=32,
        lr=2e-3,
        schedule="cosine",
        warmup_steps=10,
        slice_steps=50,
        outer=LONG_OUTER_STEPS,
        patience=1,
        width=128,
    )


TASKS: dict[str, Callable[[], Task]] = {"gpt": gpt_for_one_host, "digits": digits, "wide-gpt": gpt_for_a_slow_link}


def shortened(task: Task, steps: int) -> Task:
    """The task with fewer steps, in at least three slices, and a schedule to match."""
    each = min(task.slice_steps, steps // 3)
    outer = replace(task.outer, sync_every=min(task.outer.sync_every, each))
    return replace(task, steps=steps, warmup_steps=min(task.warmup_steps, steps), slice_steps=each, outer=outer)
