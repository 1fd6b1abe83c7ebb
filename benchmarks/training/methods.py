"""All methods by name. Each wraps a model so that ranks train it together. All functions are collective."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from benchmarks.training.replica import Replica
from benchmarks.training.tasks import Task
from torchddp import Precision
from torchddp.harness.variants import TUNED_OPTIONS

POWERSGD_RANK = 4
POWERSGD_HIGHER_RANKS = (8, 16)
# The first step at which torch's hook can compress with error feedback; its default is 1,000. Our hook starts at the
# same step, when AdamW has seen uncompressed gradients.
POWERSGD_START = 2
# torch's hook sends its second and third message from callbacks, whose order may differ between ranks: over gloo, with
# several buckets, messages of different buckets collide and the process aborts.
ONE_BUCKET_MB = 1000.0
# DiLoCo's settings with fragments, as in the paper (Streaming DiLoCo) but with fewer, because the model is small.
FRAGMENTS, OVERLAP_STEPS, STREAMING_ALPHA, STREAMING_WIRE = 4, 5, 0.5, "int4"
FP32_BYTES, FP16_BYTES = 4, 2


@dataclass(frozen=True)
class Setup:
    """The setting that a method is built for."""

    task: Task
    seed: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Method:
    """A way to train together; `name` is its name in tables."""

    name: str
    what: str
    build: Callable[[Setup], Replica]
    # The highest final loss, over torch DDP's, that we accept on one host.
    bound: float | None = None


def ring_bytes(payload_bytes: int, world_size: int) -> int:
    """The bytes that each rank of a ring sends for an all-reduce."""
    return 2 * (world_size - 1) * payload_bytes // world_size


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _torch_ddp(setup: Setup, module: nn.Module, **options: Any) -> TorchDDP:
    """Torch's class with its fastest options, as far as this torch supports them."""
    known = inspect.signature(TorchDDP.__init__).parameters
    tuned = {key: value for key, value in TUNED_OPTIONS.items() if key in known}
    return TorchDDP(module, process_group=setup.group, **tuned, **options)


def _torch(bucket_cap_mb: float | None = None, hook: Any = None, element_bytes: int = FP32_BYTES) -> Any:
    def build(setup: Setup) -> Replica:
        module = setup.task.make_model(setup.seed)
        model = _torch_ddp(setup, module, **({} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb}))
        if hook is not None:
            model.register_comm_hook(setup.group, hook)
        optimizer = setup.task.make_optimizer(module)
        sent = ring_bytes(_numel(module) * element_bytes, setup.group.size())
        return Replica(module, model, optimizer, optimizer, lambda: sent)

    return build


def _torch_powersgd(setup: Setup) -> Replica:
    module = setup.task.make_model(setup.seed)
    model = _torch_ddp(setup, module, bucket_cap_mb=ONE_BUCKET_MB)
    state = powerSGD_hook.PowerSGDState(
        setup.group, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_START
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = setup.task.make_optimizer(module)
    counted = 0

    def step_bytes() -> int:
        nonlocal counted
        compressed = state.total_numel_after_compression - counted
        counted += compressed
        # The hook's statistics do not include steps before the first compressed one.
        return ring_bytes((compressed or _numel(module)) * FP32_BYTES, setup.group.size())

    return Replica(module, model, optimizer, optimizer, step_bytes)


def _ours(make_hook: Callable[[Any], Any] | None = None, **options: Any) -> Callable[[Setup], Replica]:
    """Our class; `make_hook` receives the module `torchddp.comm_hooks`."""

    def build(setup: Setup) -> Replica:
        from torchddp import DistributedDataParallel

        module = setup.task.make_model(setup.seed)
        hook = None
        if make_hook is not None:
            from torchddp import comm_hooks

            hook = make_hook(comm_hooks)
        given = options if hook is None else {**options, "comm_hook": hook}
        model: Any = DistributedDataParallel(module, process_group=setup.group, **given)
        optimizer = setup.task.make_optimizer(module)

        def step_bytes() -> int | None:
            sent = [traffic.wire_bytes for traffic in model.traffic().values()]
            return None if None in sent else sum(sent)

        replica = Replica(module, model, optimizer, optimizer, step_bytes)
        return replica if hook is None else replace(replica, close=hook.close)

    return build


def _hook(name: str) -> Callable[[Setup], Replica]:
    return _ours(lambda hooks: hooks.resolve(name)[1])


def _local(module: nn.Module, inner: Any, outer: Any) -> Replica:
    """A bare module under an optimizer of `torchddp.averaging`."""
    counted = outer.traffic

    def step_bytes() -> int:
        nonlocal counted
        # The traffic of the last synchronization; each creates a new object.
        before, counted = counted, outer.traffic
        sent: int = 0 if counted is before else counted.wire_bytes
        return sent

    return Replica(module, module, outer, inner, step_bytes)


def _power_sgd(rank: int, hooks: Any) -> Any:
    return hooks.PowerSGD(rank=rank, start_step=POWERSGD_START, clamp_rank=True)


def _averaging() -> Any:
    from torchddp import averaging  # not needed by other methods

    return averaging


def _outer_options(setup: Setup) -> dict[str, Any]:
    outer = setup.task.outer
    return {
        "sync_every": outer.sync_every,
        "outer_lr": outer.lr,
        "outer_momentum": outer.momentum,
        "nesterov": outer.momentum > 0,
        "process_group": setup.group,
    }


def _diloco(setup: Setup) -> Replica:
    module = setup.task.make_model(setup.seed)
    inner = setup.task.make_optimizer(module)
    outer = _averaging().DiLoCo(module, inner, wire=setup.task.outer.wire, **_outer_options(setup))
    return _local(module, inner, outer)


def _streaming_diloco(setup: Setup) -> Replica:
    module = setup.task.make_model(setup.seed)
    inner = setup.task.make_optimizer(module)
    outer = _averaging().DiLoCo(
        module,
        inner,
        fragments=FRAGMENTS,
        overlap_steps=OVERLAP_STEPS,
        alpha=STREAMING_ALPHA,
        wire=STREAMING_WIRE,
        **_outer_options(setup),
    )
    replica = _local(module, inner, outer)

    def finish() -> int:
        outer.finish()
        return replica.step_bytes() or 0

    return replace(replica, finish=finish)


OTHER_CAP_MB = 5.0
# A rounded gradient, or int8's error, which is fed back, is off by far less than the noise of a batch. What a low rank
# leaves out is applied some steps later. Ranks of local methods diverge between outer steps.
EXACT_BOUND, LOW_RANK_BOUND, LOCAL_BOUND = 1.01, 1.03, 1.03
_ALL = (
    Method("torch-ddp", "torch DDP, tuned, default bucket sizes", _torch()),
    Method("torch-ddp-5", f"the same, bucket_cap_mb={OTHER_CAP_MB:g}", _torch(OTHER_CAP_MB)),
    Method(
        "torch-fp16",
        "torch DDP, tuned, fp16_compress_hook",
        _torch(hook=default_hooks.fp16_compress_hook, element_bytes=FP16_BYTES),
    ),
    Method("torch-powersgd", f"torch DDP, tuned, one bucket, powerSGD_hook, rank {POWERSGD_RANK}", _torch_powersgd),
    Method("exact", "torchddp", _ours()),
    Method("wire-bf16", "torchddp, Precision(wire=torch.bfloat16)", _ours(precision=Precision(wire=torch.bfloat16))),
    Method("fp16", "torchddp, comm_hook='fp16'", _hook("fp16"), EXACT_BOUND),
    Method("bf16", "torchddp, comm_hook='bf16'", _hook("bf16"), EXACT_BOUND),
    Method("int8", "torchddp, comm_hook='int8', error feedback", _hook("int8"), EXACT_BOUND),
    Method("int4", "torchddp, comm_hook='int4', error feedback", _hook("int4")),
    *(
        Method(
            name,
            f"torchddp, one bucket, PowerSGD, rank {rank}, error feedback",
            _ours(partial(_power_sgd, rank), bucket_cap_mb=ONE_BUCKET_MB),
            LOW_RANK_BOUND,
        )
        for name, rank in (("powersgd", POWERSGD_RANK), *((f"powersgd-{rank}", rank) for rank in POWERSGD_HIGHER_RANKS))
    ),
    Method("diloco", "torchddp.averaging, DiLoCo", _diloco, LOCAL_BOUND),
    Method(
        "streaming-diloco",
        f"torchddp.averaging, DiLoCo, {FRAGMENTS} fragments, {STREAMING_WIRE}, overlap {OVERLAP_STEPS}",
        _streaming_diloco,
        bound=LOCAL_BOUND,
    ),
)
METHODS: dict[str, Method] = {method.name: method for method in _ALL}
