"""The options of a training run, checked before anything expensive starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from examples.gpt.errors import ExampleError

DDP_CHOICES = ("torchddp", "sharded", "torch", "none")
OPTIMIZER_CHOICES = ("adamw", "muon")
DEVICE_CHOICES = ("auto", "cpu", "cuda")
SCHEDULE_CHOICES = ("cosine", "constant")
COMM_HOOK_CHOICES = ("fp16", "bf16", "int8", "int4", "powersgd")
_AT_LEAST_ONE = (
    *("steps", "batch_size", "block_size", "layers", "width", "heads"),
    *("eval_interval", "eval_batches", "grad_accum", "threads"),
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Every option of a run; the constructor raises `ExampleError` for invalid values."""

    steps: int = 150
    batch_size: int = 16
    block_size: int = 64
    layers: int = 4
    width: int = 160
    heads: int = 5
    dropout: float = 0.0
    optimizer: str = "adamw"
    lr: float = 3e-3
    muon_lr: float = 0.02
    schedule: str = "cosine"
    warmup_steps: int = 10
    seed: int = 0
    eval_interval: int = 50
    eval_batches: int = 4
    grad_accum: int = 1
    ddp: str = "torchddp"
    device: str = "auto"
    threads: int = 1
    data: Path | None = None
    checkpoint: Path | None = None
    save_every: int = 0
    resume: bool = False
    stop_after: int | None = None
    json_path: Path | None = None
    measure_comm: int = 0
    comm_hook: str | None = None

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            _require(getattr(self, name) >= 1, f"{_flag(name)} must be at least 1, got {getattr(self, name)}")
        for name in ("warmup_steps", "save_every", "measure_comm", "seed"):
            _require(getattr(self, name) >= 0, f"{_flag(name)} must not be negative, got {getattr(self, name)}")
        _require_choice("ddp", self.ddp, DDP_CHOICES)
        _require_choice("optimizer", self.optimizer, OPTIMIZER_CHOICES)
        _require_choice("device", self.device, DEVICE_CHOICES)
        _require_choice("schedule", self.schedule, SCHEDULE_CHOICES)
        _require(
            self.width % self.heads == 0,
            f"--width must be a multiple of --heads, got width {self.width} and heads {self.heads}",
        )
        _require(0.0 <= self.dropout < 1.0, f"--dropout must be in [0, 1), got {self.dropout}")
        for name in ("lr", "muon_lr"):
            rate = getattr(self, name)
            _require(math.isfinite(rate) and rate > 0, f"{_flag(name)} must be a positive number, got {rate}")
        _require(
            self.stop_after is None or 1 <= self.stop_after <= self.steps,
            f"--stop-after must be between 1 and --steps ({self.steps}), got {self.stop_after}",
        )
        if self.comm_hook is not None:
            _require_choice("comm_hook", self.comm_hook, COMM_HOOK_CHOICES)
            _require(self.ddp == "torchddp", f"--comm-hook needs --ddp torchddp, got --ddp {self.ddp}")
        needs_checkpoint = "--resume" if self.resume else "--save-every" if self.save_every else None
        _require(self.checkpoint is not None or needs_checkpoint is None, f"{needs_checkpoint} needs --checkpoint PATH")

    @property
    def last_step(self) -> int:
        """The step this run ends with (the learning rate schedule always spans `steps`)."""
        return self.steps if self.stop_after is None else self.stop_after

    def model_identity(self) -> dict[str, int | float | str]:
        """The options that determine the shape of the model."""
        return {name: getattr(self, name) for name in ("block_size", "layers", "width", "heads")}

    def training_identity(self) -> dict[str, int | float | str]:
        """The options that determine the losses, in addition to model, data and world size."""
        names = ["batch_size", "grad_accum", "seed", "dropout", "optimizer", "lr", "schedule", "warmup_steps"]
        if self.optimizer == "muon":
            names.append("muon_lr")
        if self.schedule == "cosine":
            names.append("steps")  # with a constant rate, a resumed run may train for more steps
        if self.comm_hook is not None:
            names.append("comm_hook")
        return {name: getattr(self, name) for name in names}


def lr_factor(step: int, config: TrainConfig) -> float:
    """Fraction of the full learning rate at 0-based `step`: linear warm-up, then cosine to 10% or constant."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * min(1.0, done)))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ExampleError(message)


def _require_choice(name: str, got: str, choices: tuple[str, ...]) -> None:
    _require(got in choices, f"unknown {_flag(name)} '{got}': choose one of {', '.join(choices)}")
