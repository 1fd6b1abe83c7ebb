"""What is measured: the cases, their models and the settings of one run. Pure data, imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torchddp.harness.variants import DEFAULT_CAPS_MB, Variant

# A round is one step of every variant. Below this many rounds a median says little.
MIN_ROUNDS = 7
MAX_ROUNDS = 5000
# glibc keeps freed blocks below its (growing) threshold; pinned low, every gradient is its own mapping and the
# resident set shows what is held, not what was once held.
ALLOCATOR_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536"}


# The built-in models, in torchddp.harness.models; all other names are `package.module:factory`.
MODEL_NAMES = ("small", "mlp", "gpt", "conv", "resnet50", "gpt2", "llama")
# Where the bucket size is not the question, torch's tuned row has torch's own default size.
ONE_CAP_MB = (25.0,)
DEFAULT_WORLD_SIZES = (1, 2, 4)
QUICK_WORLD_SIZES = (1, 2)


@dataclass(frozen=True)
class Case:
    """One question the benchmark answers, and for which models; none where it asks about no DDP class."""

    name: str
    title: str
    # Run without --model; with it, any model will do.
    models: tuple[str, ...]
    quick_models: tuple[str, ...]
    default_world_size: int
    unit: str
    # The ratio to torch's best that we hold ourselves to; None where the case has no ratio.
    goal_ratio: float | None = None
    # For the timed rounds of each model, without --seconds.
    seconds: float = 45.0
    # Bucket sizes of the tuned rows, without --caps.
    caps_mb: tuple[float, ...] = DEFAULT_CAPS_MB
    # With fewer ranks there is nothing to measure.
    min_world_size: int = 1


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            name="step_time",
            title="time of a training step (forward, backward, SGD)",
            models=("mlp", "gpt"),
            quick_models=("mlp",),
            default_world_size=2,
            unit="ms",
            seconds=15.0,
        ),
        Case(
            name="overlap",
            title="how much of the communication hides behind the computation",
            models=("gpt",),
            quick_models=("mlp",),
            default_world_size=2,
            unit="ms",
            seconds=15.0,
            caps_mb=ONE_CAP_MB,
            min_world_size=2,
        ),
        Case(
            name="collective",
            title="single collectives over message sizes (no model: torch's gloo and our transports)",
            models=(),
            quick_models=(),
            default_world_size=2,
            unit="us",
        ),
        Case(
            name="startup",
            title="time until training runs (constructor and first two steps)",
            models=("small", "mlp"),
            quick_models=("mlp",),
            default_world_size=2,
            unit="ms",
            seconds=15.0,
            caps_mb=ONE_CAP_MB,
        ),
        Case(
            name="memory",
            title="peak memory of a training step (resident set, one launch per variant)",
            models=("mlp", "gpt"),
            quick_models=("mlp",),
            default_world_size=2,
            unit="MB",
            caps_mb=ONE_CAP_MB,
        ),
        Case(
            name="scaling",
            title="time of a training step over the number of ranks (the batch of a rank stays the same)",
            models=("mlp",),
            quick_models=("mlp",),
            default_world_size=2,
            unit="ms",
            seconds=30.0,
            caps_mb=ONE_CAP_MB,
        ),
        Case(
            name="per_param",
            title="cost per parameter (DDP step minus the same step without DDP, divided by the parameters)",
            models=("small",),
            quick_models=("small",),
            default_world_size=1,
            unit="us/param",
            goal_ratio=0.15,
        ),
        Case(
            name="exposed",
            title="exposed cost (DDP step minus the same step without DDP, forward and backward)",
            models=("small", "mlp", "gpt", "conv"),
            quick_models=("small", "mlp", "conv"),
            default_world_size=2,
            unit="ms",
            goal_ratio=0.95,
        ),
    )
}
# About two minutes.
DEFAULT_CASES = ("step_time", "overlap", "memory")


class RankSettings(Protocol):
    """What starting ranks needs to know of a job."""

    @property
    def case(self) -> str:
        """Its name, for messages."""

    @property
    def world_size(self) -> int:
        """How many ranks."""

    @property
    def backend(self) -> str:
        """Of their process group."""

    @property
    def collective_timeout_s(self) -> float:
        """A rank that waits longer than this for another one gives up with an error."""


@dataclass(frozen=True)
class Job:
    """Everything one launch of worker processes needs to know. Picklable."""

    case: str
    models: tuple[str, ...]
    variants: tuple[Variant, ...]
    world_size: int
    seconds: float
    seed: int = 0
    # A rank that waits longer than this for another one gives up with an error.
    collective_timeout_s: float = 60.0
    backend: str = "gloo"
    # Of the case `collective`, in place of models and variants.
    operations: tuple[str, ...] = ()
    sizes_bytes: tuple[int, ...] = ()

    @property
    def control_device(self) -> str:
        """Where tensors must be for what the ranks tell each other beside the work that is timed."""
        return "cuda" if self.backend == "nccl" else "cpu"
