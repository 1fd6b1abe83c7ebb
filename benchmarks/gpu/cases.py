"""The GPU benchmark's cases and the settings of one launch. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from torchddp.bench.cases import Case, Job

# Upper bounds on our cost over the cost of torch's best.
GOALS = {"small": 0.3, "resnet50": 0.5, "gpt2": 0.5}
MODELS_CASE = Case(
    name="gpu",
    title="cost on a GPU (DDP step minus the same step without DDP, forward and backward)",
    models=tuple(GOALS),
    quick_models=tuple(GOALS),
    default_world_size=1,
    unit="ms",
)
# Cases with a row per way to do one operation.
PACK_CASE, SCALE_CASE, HOST_CASE = "gpu_pack", "gpu_scale", "gpu_host"
OPTIONS_CASE, MEMORY_CASE, LEAVE_CASE = "gpu_options", "gpu_memory", "gpu_leave"
# Lower bound, as a fraction of a plain copy's bandwidth on the same device in the same run.
PACK_GOAL = 0.9
KIB, MIB = 1024, 1024 * 1024


@dataclass(frozen=True)
class Way:
    """A way to train a model that differs from the default."""

    name: str
    # Options of all classes.
    options: tuple[tuple[str, object], ...] = ()
    set_to_none: bool = True
    # Models in the process; each step runs them one after another.
    models: int = 1


USUAL = Way("")
WAYS = (
    Way("find_unused_parameters", options=(("find_unused_parameters", True),)),
    Way("zero_grad(set_to_none=False)", set_to_none=False),
    Way("4 models in the process", models=4),
)


@dataclass(frozen=True)
class GpuJob(Job):
    """One launch on one kind of device. Picklable."""

    device: str = "cuda"
    # Small models instead of the real ones.
    quick: bool = False
    # Tokens per sequence of gpt2.
    sequence: int = 1024
    way: Way = USUAL
