"""Ways to train on a device. Each runs with torch's class and ours from the same seed; results must be bitwise equal.

This holds for one and two ranks: a sum of two numbers does not depend on their order, and dividing by 1 or 2 is exact.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel.distributed import _MixedPrecision

from tests.gpu.device import chosen_device
from tests.models import Branches, Mlp, NormNet, batch, loss_of
from tests.parity.compare import assert_same_as_torch
from tests.parity.test_hooks import REGISTER, registers
from tests.parity.test_training import Checkpointed

FLOAT = torch.float32
WIDTH = 32
LARGE_BYTES = 64  # these models' gradients are small; larger ones take the path for large gradients


Step = Callable[[torch.device, Any, int, int], None]  # (device, model, rank, step)


@dataclass(frozen=True)
class Case:
    """A model and its training step."""

    make: Callable[[], nn.Module]
    run: Step
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[nn.Module], None] | None = None
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None = None
    set_to_none: bool = True
    steps: int = 4
    rtol: float = 0.0
    # torch's class refuses it on the CPU, or it differs there.
    gpu_only: bool = False
    # Compiles a model, which takes seconds; one run is enough.
    slow: bool = False


def sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def mlp(dtype: torch.dtype = FLOAT) -> Callable[[], nn.Module]:
    return lambda: Mlp(WIDTH, dtype)


def plain(*shape: int, dtype: torch.dtype = FLOAT) -> Step:
    """A step of one forward and backward on a batch of this shape."""

    def run(device: torch.device, model: Any, rank: int, step: int) -> None:
        loss_of(model(batch(rank, step, *(shape or (6, WIDTH)), dtype=dtype).to(device))).backward()

    return run


IMAGES = (4, 3, 8, 8)
SMALL_BUCKETS = {"bucket_cap_mb": 0.004}
BF16 = _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)  # parameters, reduction, buffers


class ManyParameters(nn.Module):
    """More tensors than one kernel launch takes, of uneven sizes."""

    def __init__(self, count: int = 1500) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(1 + 7 * i % 61) for i in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(weight * x).sum() for weight in self.weights])


class MixedTypes(nn.Module):
    """Parameters of two dtypes, whose gradients cannot share a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).bfloat16()).float())


class ChannelsLast(NormNet):
    """Convolutions with channels-last weights, and so gradients."""

    def __init__(self) -> None:
        super().__init__(FLOAT)
        self.to(memory_format=torch.channels_last)


def frozen() -> nn.Module:
    model = Mlp(WIDTH, FLOAT)
    model.middle.requires_grad_(False)
    return model


def with_own_optimizer() -> nn.Module:
    # Moved first: a moved parameter gets a new graph node, without the optimizer's hook.
    model = Mlp(WIDTH, FLOAT).to(chosen_device())
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.01})
    return model


def branches(device: torch.device, model: Any, rank: int, step: int) -> None:
    branch = ("left", "right", "never")[(rank + step) % 3]
    loss_of(model(batch(rank, step, 3, 4, dtype=FLOAT).to(device), branch)).backward()


def accumulated(device: torch.device, model: Any, rank: int, step: int) -> None:
    with model.no_sync():
        plain()(device, model, rank, 10 * step)
        plain()(device, model, rank, 10 * step + 1)
    plain()(device, model, rank, 10 * step + 2)


def several_forwards(device: torch.device, model: Any, rank: int, step: int) -> None:
    batches = [batch(rank, 10 * step + i, 6, WIDTH, dtype=FLOAT).to(device) for i in range(3)]
    torch.stack([loss_of(model(x)) for x in batches]).sum().backward()


def clipped(device: torch.device, model: Any, rank: int, step: int) -> None:
    plain()(device, model, rank, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def loss_under_autocast(device: torch.device, model: Any, rank: int, step: int, dtype: torch.dtype) -> Tensor:
    with torch.autocast(device.type, dtype):
        return loss_of(model(batch(rank, step, 6, WIDTH, dtype=FLOAT).to(device)).float())


def autocast_bf16(device: torch.device, model: Any, rank: int, step: int) -> None:
    loss_under_autocast(device, model, rank, step, torch.bfloat16).backward()


def scaled(device: torch.device, model: Any, rank: int, step: int) -> None:
    """fp16 with a loss scale; the second step overflows and must be skipped."""
    scaler, optimizer = model.scaler_and_optimizer
    loss = loss_under_autocast(device, model, rank, step, torch.float16)
    scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step == 1:
        assert scaler.get_scale() < INITIAL_SCALE, "the overflow was not seen"
        model.zero_grad(set_to_none=True)  # NaN is not equal to itself


INITIAL_SCALE = 1024.0


def prepare_scaler(ddp: Any) -> None:
    device = next(ddp.parameters()).device
    ddp.scaler_and_optimizer = (torch.amp.GradScaler(device.type, init_scale=INITIAL_SCALE), sgd(ddp.parameters()))


def channels_last_images(device: torch.device, model: Any, rank: int, step: int) -> None:
    images = batch(rank, step, *IMAGES, dtype=FLOAT).to(device)
    loss_of(model(images.contiguous(memory_format=torch.channels_last))).backward()


def adamw(fused: bool) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
    return lambda params: torch.optim.AdamW(params, lr=1e-3, fused=fused)


CASES: dict[str, Case] = {
    "fp32": Case(mlp(), plain(), SMALL_BUCKETS, optimizer=sgd),
    "fp64": Case(mlp(torch.float64), plain(dtype=torch.float64), SMALL_BUCKETS, optimizer=sgd),
    "bf16": Case(mlp(torch.bfloat16), plain(dtype=torch.bfloat16), SMALL_BUCKETS, optimizer=sgd),
    "fp16": Case(mlp(torch.float16), plain(dtype=torch.float16), SMALL_BUCKETS),
    "default_buckets": Case(mlp(), plain(), optimizer=sgd),
    "large": Case(
        lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))), plain(8, 1024), {"bucket_cap_mb": 5},
        optimizer=sgd,
    ),
    "many_parameters": Case(ManyParameters, plain(1), optimizer=sgd),
    "mixed_types": Case(MixedTypes, plain(), optimizer=sgd),
    "views": Case(mlp(), plain(), {**SMALL_BUCKETS, "gradient_as_bucket_view": True}, optimizer=sgd),
    "copies": Case(mlp(), plain(), {**SMALL_BUCKETS, "gradient_as_bucket_view": False}, optimizer=sgd),
    "zeroed_gradients": Case(mlp(), plain(), SMALL_BUCKETS, set_to_none=False, optimizer=sgd),
    "static_graph": Case(mlp(), plain(), {**SMALL_BUCKETS, "static_graph": True}, optimizer=sgd),
    "static_graph_copies": Case(
        mlp(), plain(), {**SMALL_BUCKETS, "static_graph": True, "gradient_as_bucket_view": False}
    ),
    "unused": Case(lambda: Branches(FLOAT), branches, {"find_unused_parameters": True}, steps=6),
    "frozen": Case(frozen, plain(), SMALL_BUCKETS, optimizer=sgd),
    "no_sync": Case(mlp(), accumulated, SMALL_BUCKETS, optimizer=sgd),
    "no_sync_copies": Case(mlp(), accumulated, {**SMALL_BUCKETS, "gradient_as_bucket_view": False}),
    "several_forwards": Case(mlp(), several_forwards, SMALL_BUCKETS),
    "batch_norm": Case(lambda: NormNet(FLOAT), plain(*IMAGES), optimizer=sgd),
    "channels_last": Case(ChannelsLast, channels_last_images, optimizer=sgd),
    "checkpoint": Case(lambda: Checkpointed(False), plain(3, 4, dtype=torch.float64)),
    "checkpoint_reentrant": Case(lambda: Checkpointed(True), plain(3, 4, dtype=torch.float64)),
    "checkpoint_static": Case(
        lambda: Checkpointed(True), plain(3, 4, dtype=torch.float64), {"static_graph": True}
    ),
    "clip_grad_norm": Case(mlp(), clipped, SMALL_BUCKETS, optimizer=sgd),
    "adamw": Case(mlp(), plain(), SMALL_BUCKETS, optimizer=adamw(False)),
    "adamw_fused": Case(mlp(), plain(), SMALL_BUCKETS, optimizer=adamw(True)),
    "autocast_bf16": Case(mlp(), autocast_bf16, SMALL_BUCKETS, optimizer=sgd),
    "grad_scaler": Case(mlp(), scaled, SMALL_BUCKETS, prepare=prepare_scaler),
    "hook_allreduce": Case(mlp(), plain(), prepare=REGISTER["allreduce"]),
    "hook_fp16": Case(mlp(), plain(), prepare=REGISTER["fp16"]),
    "hook_bf16": Case(mlp(), plain(), prepare=registers(default_hooks.bf16_compress_hook), gpu_only=True),
    "hook_in_python": Case(mlp(), plain(), SMALL_BUCKETS, prepare=REGISTER["futures_chained_in_python"]),
    "hook_power_sgd": Case(mlp(), plain(), prepare=REGISTER["power_sgd"], rtol=1e-6),
    "hook_builtin_fp16": Case(mlp(), plain(), prepare=REGISTER["builtin_fp16"]),
    # torch sums in the reduced precision, ours in that of the buckets.
    "mixed_precision": Case(
        mlp(), plain(), {"mixed_precision": BF16}, optimizer=sgd, rtol=1e-2, gpu_only=True
    ),
    "optimizer_in_backward": Case(
        with_own_optimizer, plain(), {"gradient_as_bucket_view": True}, gpu_only=True
    ),
    # The generated code is the same for both classes; what it fuses may depend on the buckets.
    "compiled_model": Case(
        lambda: torch.compile(Mlp(WIDTH, FLOAT)), plain(), optimizer=sgd, rtol=1e-5, gpu_only=True, slow=True
    ),
}  # fmt: skip


def names(device: torch.device) -> list[str]:
    """The cases for this device, without slow ones."""
    return [name for name, case in CASES.items() if (device.type == "cuda" or not case.gpu_only) and not case.slow]


def run_case(name: str, device: torch.device, ddp_class: Any, *, device_ids: bool = True) -> None:
    """Train both classes in this process group and compare gradients after each step, weights and buffers at the end.

    `ddp_class` takes torch's arguments; bind a transport to it beforehand.
    """
    case = CASES[name]
    options = dict(case.options)
    if device.type == "cuda" and device_ids:
        options["device_ids"] = [device.index]
    # torch's mixed precision reads memory that torch would fill with NaNs (torch 2.11 on an H100, first step).
    torch.utils.deterministic.fill_uninitialized_memory = "mixed_precision" not in options
    settings = {name: getattr(case, name) for name in ("prepare", "optimizer", "set_to_none")} | {"options": options}
    run = partial(case.run, device)
    assert_same_as_torch(ddp_class, lambda: case.make().to(device), run, case.steps, case.rtol, **settings)
