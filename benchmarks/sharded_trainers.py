"""Models with sharded optimizers, of torch, of torchddp and of other packages: their training step and tensors."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import AdamW, Optimizer

from torchddp import DistributedDataParallel, ShardedDataParallel
from torchddp.bench.timing import start_together
from torchddp.ddp.options import TransportChoice
from torchddp.harness.models import output_is_loss, run_forward
from torchddp.harness.variants import TUNED_OPTIONS, load_class
from torchddp.optim import OSS

LEARNING_RATE = 1e-3
# Stage 2 of ZeRO, in fp32, with defaults otherwise, except clipping, which is on by default (norm 1): it would change
# the training and be more work than the others do.
DEEPSPEED_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 0.0,
    "steps_per_print": 1_000_000_000,
}


@dataclass
class Trainer:
    """Zeroes gradients, runs forward and backward, and updates; `bare` is the model inside `module`."""

    module: nn.Module
    bare: nn.Module
    optimizer: Any
    # Maps the module's output to the loss.
    loss: Callable[[Any], Tensor] = output_is_loss

    def step(self, batch: Any, world_size: int = 1) -> float:
        """Runs a whole training step, started by `world_size` ranks at once; returns its wall time in ms."""
        start_together(world_size)
        start_ns = time.perf_counter_ns()
        self.backward(batch)
        self.update()
        return (time.perf_counter_ns() - start_ns) / 1e6

    def backward(self, batch: Any) -> None:
        """Drop the gradients and compute new ones."""
        self.zero_grad()
        self.loss(run_forward(self.module, batch)).backward()

    def zero_grad(self) -> None:
        """Drop gradients as torch's optimizers do by default."""
        self.optimizer.zero_grad()

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate as a scheduler does."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def full_parameters(self) -> list[Tensor]:
        """The full parameters, detached; collective if they are sharded."""
        whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in self.bare.parameters())
        return [tensor.detach() for tensor in whole]

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that updates this rank's share."""
        inner: torch.optim.Optimizer = getattr(self.optimizer, "optim", self.optimizer)
        return inner

    def parameter_tensors(self) -> list[Tensor]:
        """The model's parameters, and the tensors that the optimizer updates instead."""
        updated = [p for group in self.inner_optimizer.param_groups for p in group["params"]]
        return [*self.bare.parameters(), *updated]

    def gradient_tensors(self) -> list[Tensor]:
        """All tensors that hold gradients now."""
        return [p.grad for p in self.parameter_tensors() if p.grad is not None]

    def state_tensors(self) -> list[Tensor]:
        """The optimizer's state on this rank."""
        return list(tensors_in(self.inner_optimizer.state.values()))


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Every tensor in nested dicts, lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each counted once; of a sharded tensor, this rank's."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class FairscaleTrainer(Trainer):
    """Uses the wrapper's `zero_grad`: the optimizer's, with set_to_none, would detach gradients from their buckets."""

    def zero_grad(self) -> None:
        """Drop gradients outside of buckets, zero the buckets."""
        self.module.zero_grad(set_to_none=True)

    def gradient_tensors(self) -> list[Tensor]:
        """Includes the buckets, which outlive the gradients in them."""
        module: Any = self.module
        return [*super().gradient_tensors(), *(b.buffer for b in module._bucket_list if b.buffer is not None)]


def fairscale(module: nn.Module, **options: Any) -> Trainer:
    """OSS and ShardedDataParallel."""
    optimizer = load_class("fairscale.optim.oss.OSS")(module.parameters(), optim=AdamW, lr=LEARNING_RATE, **options)
    wrapped = load_class("fairscale.nn.data_parallel.ShardedDataParallel")(module, optimizer)
    return FairscaleTrainer(wrapped, module, optimizer)


@dataclass
class DeepspeedTrainer(Trainer):
    """Uses the engine's own backward and step, which zeroes the gradients."""

    def backward(self, batch: Any) -> None:
        """Run backward through the engine, which reduces the gradients."""
        engine: Any = self.module
        engine.backward(self.loss(run_forward(engine, batch)))

    def update(self) -> None:
        """Update and zero the gradients."""
        engine: Any = self.module
        engine.step()

    @property
    def inner_optimizer(self) -> Optimizer:
        """The optimizer of this rank's flat fp32 weights."""
        inner: Optimizer = self.optimizer.optimizer
        return inner

    def gradient_tensors(self) -> list[Tensor]:
        """Includes averaged gradients, which are kept in a list of the optimizer."""
        return [*super().gradient_tensors(), *tensors_in([self.optimizer.averaged_gradients])]


def deepspeed(module: nn.Module, **options: Any) -> Trainer:
    """ZeRO stage 2 in the existing process group, with torch's AdamW, on a CPU, logging errors only."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # deepspeed requires it
    package = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Its compilation at the first start takes a minute. Only inference_all_reduce uses it, which training never calls.
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    package.init_distributed(dist_backend="gloo")
    optimizer = AdamW(module.parameters(), lr=LEARNING_RATE, **options)
    engine, zero, _, _ = package.initialize(model=module, optimizer=optimizer, config=DEEPSPEED_CONFIG)
    return DeepspeedTrainer(engine, module, zero)


def ddp(cls: Any, module: nn.Module) -> nn.Module:
    """The class around the module; torch's with its fastest options, as far as this torch supports them."""
    known = inspect.signature(TorchDDP.__init__).parameters
    options = {key: value for key, value in TUNED_OPTIONS.items() if key in known} if cls is TorchDDP else {}
    wrapped: nn.Module = cls(module, **options)
    return wrapped


def plain(cls: Any, module: nn.Module, **options: Any) -> Trainer:
    return Trainer(ddp(cls, module), module, AdamW(module.parameters(), lr=LEARNING_RATE, **options))


def zero(module: nn.Module, **options: Any) -> Trainer:
    optimizer = ZeroRedundancyOptimizer(module.parameters(), AdamW, lr=LEARNING_RATE, **options)
    return Trainer(ddp(TorchDDP, module), module, optimizer)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: children with parameters of each nn.Sequential, outermost first."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.Sequential):
            found += [block for block in child if any(True for _ in block.parameters())]
        else:
            found += blocks_of(child)
    return found


def fsdp2(module: nn.Module, **options: Any) -> Trainer:
    """`fully_shard` per block and root."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (*blocks_of(module), module):
        fully_shard(block, mesh=mesh)
    return Trainer(module, module, AdamW(module.parameters(), lr=LEARNING_RATE, **options))


def ours(module: nn.Module, transport: TransportChoice = "auto", **options: Any) -> Trainer:
    optimizer = OSS(module.parameters(), optim=AdamW, lr=LEARNING_RATE, **options)
    return Trainer(ShardedDataParallel(module, optimizer, transport=transport), module, optimizer)


# By the variant's name. All use AdamW; `fused=True` is an option of AdamW.
BUILDERS: dict[str, Callable[[nn.Module], Trainer]] = {
    "torch-ddp": partial(plain, TorchDDP),
    "torch-ddp-fused": partial(plain, TorchDDP, fused=True),
    "torch-zero": zero,
    "torch-zero-view": partial(zero, parameters_as_bucket_view=True),
    "torch-zero-fused": partial(zero, fused=True),
    "torch-zero-both": partial(zero, parameters_as_bucket_view=True, fused=True),
    "fsdp2": partial(fsdp2, fused=True),
    "fairscale": fairscale,
    "fairscale-fused": partial(fairscale, fused=True),
    "deepspeed": partial(deepspeed, fused=True),
    "torchddp-ddp": partial(plain, DistributedDataParallel, fused=True),
    "torchddp-auto": partial(ours, fused=True),
    "torchddp-c10d": partial(ours, transport="c10d", fused=True),
    "torchddp-plain": ours,
}
