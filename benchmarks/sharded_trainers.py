"""Models with sharded optimizers, of torch, of torchddp and of other packages: their training step and tensors."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from torch.optim import AdamW, Muon, Optimizer

from benchmarks import newton_schulz
from torchddp import DistributedDataParallel, ShardedDataParallel
from torchddp.bench.timing import start_together
from torchddp.cli.balance import hidden_matrices
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


@dataclass(frozen=True)
class Part:
    """Parameters, and the class and options of their optimizer."""

    params: list[nn.Parameter]
    optim: type[Optimizer]
    options: Mapping[str, Any]


# The parts of a model's parameters, which differ in their optimizer.
Parts = Callable[[nn.Module], list[Part]]


def adamw(module: nn.Module, **options: Any) -> list[Part]:
    return [Part([*module.parameters()], AdamW, {"lr": LEARNING_RATE, **options})]


def muon(module: nn.Module) -> list[Part]:
    """Muon for the hidden matrices, AdamW for the rest. All options in which packages' defaults differ."""
    matrices = hidden_matrices(module)
    rest = [p for p in module.parameters() if all(p is not matrix for matrix in matrices)]
    return [
        Part(matrices, Muon, {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}),
        Part(rest, AdamW, {"lr": LEARNING_RATE, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}),
    ]


@dataclass
class Trainer:
    """Zeroes gradients, runs forward and backward, and updates; `bare` is the model inside `module`."""

    module: nn.Module
    bare: nn.Module
    optimizers: list[Any]
    # Maps the module's output to the loss.
    loss: Callable[[Any], Tensor] = output_is_loss

    def step(self, batch: Any, world_size: int = 1) -> tuple[float, float]:
        """Runs a whole training step, started by `world_size` ranks at once.

        Returns the wall times of the step and of the update in it, in ms.
        """
        start_together(world_size)
        start_ns = time.perf_counter_ns()
        self.backward(batch)
        update_ns = time.perf_counter_ns()
        self.update()
        end_ns = time.perf_counter_ns()
        return (end_ns - start_ns) / 1e6, (end_ns - update_ns) / 1e6

    def backward(self, batch: Any) -> None:
        """Drop the gradients and compute new ones."""
        self.zero_grad()
        self.loss(run_forward(self.module, batch)).backward()

    def zero_grad(self) -> None:
        """Drop gradients as torch's optimizers do by default."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def update(self) -> None:
        """The optimizers' steps."""
        for optimizer in self.optimizers:
            optimizer.step()

    def scale_learning_rates(self, factor: float) -> None:
        """Multiply the initial learning rates, as a scheduler does."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = factor * group.setdefault("initial_lr", group["lr"])

    def full_parameters(self) -> list[Tensor]:
        """The full parameters, detached; collective if they are sharded."""
        whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in self.bare.parameters())
        return [tensor.detach() for tensor in whole]

    @property
    def inner_optimizers(self) -> list[Optimizer]:
        """The optimizers that update this rank's share."""
        return [getattr(optimizer, "optim", optimizer) for optimizer in self.optimizers]

    def parameter_tensors(self) -> list[Tensor]:
        """The model's parameters, and the tensors that the optimizer updates instead."""
        groups = (group for optimizer in self.inner_optimizers for group in optimizer.param_groups)
        updated = [p for group in groups for p in group["params"]]
        return [*self.bare.parameters(), *updated]

    def gradient_tensors(self) -> list[Tensor]:
        """All tensors that hold gradients now."""
        return [p.grad for p in self.parameter_tensors() if p.grad is not None]

    def state_tensors(self) -> list[Tensor]:
        """The optimizer's state on this rank."""
        return list(tensors_in(optimizer.state for optimizer in self.inner_optimizers))


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Every tensor in nested dicts, lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
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


def fairscale(parts: Parts, module: nn.Module) -> Trainer:
    """OSS and ShardedDataParallel."""
    cls: Any = load_class("fairscale.optim.oss.OSS")
    optimizers = [cls(part.params, optim=part.optim, **part.options) for part in parts(module)]
    wrapped = load_class("fairscale.nn.data_parallel.ShardedDataParallel")(module, optimizers)
    return FairscaleTrainer(wrapped, module, optimizers)


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
    def inner_optimizers(self) -> list[Optimizer]:
        """The optimizer of this rank's flat fp32 weights."""
        return [zero.optimizer for zero in self.optimizers]

    def gradient_tensors(self) -> list[Tensor]:
        """Includes averaged gradients, which are kept in a list of the optimizer."""
        return [*super().gradient_tensors(), *tensors_in(zero.averaged_gradients for zero in self.optimizers)]


def deepspeed(parts: Parts, module: nn.Module, **of_muon: Any) -> Trainer:
    """ZeRO stage 2 in the existing process group, on a CPU, logging errors only; torch's AdamW and DeepSpeed's Muon."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # deepspeed requires it
    package = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Its compilation at the first start takes a minute. Only inference_all_reduce uses it, which training never calls.
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    package.init_distributed(dist_backend="gloo")
    first, *others = parts(module)
    optimizer = deepspeeds_muon(first, *others, **of_muon) if others else first.optim(first.params, **first.options)
    engine, zero, _, _ = package.initialize(model=module, optimizer=optimizer, config=DEEPSPEED_CONFIG)
    return DeepspeedTrainer(engine, module, [zero])


def deepspeeds_muon(*parts: Part, **of_muon: Any) -> Optimizer:
    """The optimizer that DeepSpeed makes for `"type": "Muon"`. The flag tells ZeRO which gradients to orthogonalize."""
    groups = [{"params": part.params, "use_muon": part.optim is Muon, **part.options} for part in parts]
    for group in groups:
        group |= of_muon if group["use_muon"] else {}
        for parameter in group["params"]:
            parameter.use_muon = group["use_muon"]
    cls: Any = load_class("deepspeed.runtime.zero.muon.muon_optimizer.MuonWithAuxAdam")
    optimizer: Optimizer = cls(groups, adam_optimizer=AdamW)
    return optimizer


def ddp(cls: Any, module: nn.Module) -> nn.Module:
    """The class around the module; torch's with its fastest options, as far as this torch supports them."""
    known = inspect.signature(TorchDDP.__init__).parameters
    options = {key: value for key, value in TUNED_OPTIONS.items() if key in known} if cls is TorchDDP else {}
    wrapped: nn.Module = cls(module, **options)
    return wrapped


def plain(cls: Any, parts: Parts, module: nn.Module) -> Trainer:
    """Whole optimizers on every rank."""
    return Trainer(ddp(cls, module), module, whole_optimizers(parts(module)))


def whole_optimizers(parts: Iterable[Part]) -> list[Optimizer]:
    return [part.optim(part.params, **part.options) for part in parts]


def zero(parts: Parts, module: nn.Module, **options: Any) -> Trainer:
    optimizers = [ZeroRedundancyOptimizer(p.params, p.optim, **options, **p.options) for p in parts(module)]
    return Trainer(ddp(TorchDDP, module), module, optimizers)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: children with parameters of each nn.Sequential, outermost first."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.Sequential):
            found += [block for block in child if any(True for _ in block.parameters())]
        else:
            found += blocks_of(child)
    return found


def fsdp2(parts: Parts, module: nn.Module) -> Trainer:
    """`fully_shard` per block and root."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (*blocks_of(module), module):
        fully_shard(block, mesh=mesh)
    return Trainer(module, module, whole_optimizers(parts(module)))


def sharding(parts: Iterable[Part]) -> OSS:
    """One OSS for all parts: the last part's optimizer is the default."""
    *own, rest = parts
    groups = [{"params": part.params, "optim": part.optim, **part.options} for part in own]
    return OSS([*groups, {"params": rest.params}], optim=rest.optim, **rest.options)


def ours(parts: Parts, module: nn.Module, transport: TransportChoice = "auto") -> Trainer:
    optimizer = sharding(parts(module))
    return Trainer(ShardedDataParallel(module, optimizer, transport=transport), module, [optimizer])


class GramTrainer(Trainer):
    """With DeepSpeed's Newton-Schulz, if it is installed."""

    def update(self) -> None:
        with newton_schulz.deepspeeds():
            super().update()


def ours_gram(parts: Parts, module: nn.Module) -> Trainer:
    importlib.import_module("deepspeed")  # left out without it
    trainer = ours(parts, module)
    return GramTrainer(trainer.module, module, trainer.optimizers)


def ours_in_ddp(parts: Parts, module: nn.Module) -> Trainer:
    return Trainer(DistributedDataParallel(module), module, [sharding(parts(module))])


def deepspeed_standard(parts: Parts, module: nn.Module) -> Trainer:
    """With torch's Newton-Schulz in float32, instead of its own, which multiplies less."""
    deepspeeds: Any = importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    own = deepspeeds.ns_compute_dtype
    deepspeeds.ns_compute_dtype = lambda method: torch.float32 if method == "standard" else own(method)
    return deepspeed(parts, module, ns_method="standard")


Builder = Callable[[nn.Module], Trainer]
FUSED: Parts = partial(adamw, fused=True)
# By the variant's name. The first is the reference.
ADAMW: dict[str, Builder] = {
    "torch-ddp": partial(plain, TorchDDP, adamw),
    "torch-ddp-fused": partial(plain, TorchDDP, FUSED),
    "torch-zero": partial(zero, adamw),
    "torch-zero-view": partial(zero, adamw, parameters_as_bucket_view=True),
    "torch-zero-fused": partial(zero, FUSED),
    "torch-zero-both": partial(zero, FUSED, parameters_as_bucket_view=True),
    "fsdp2": partial(fsdp2, FUSED),
    "fairscale": partial(fairscale, adamw),
    "fairscale-fused": partial(fairscale, FUSED),
    "deepspeed": partial(deepspeed, FUSED),
    "torchddp-ddp": partial(plain, DistributedDataParallel, FUSED),
    "torchddp-auto": partial(ours, FUSED),
    "torchddp-c10d": partial(ours, FUSED, transport="c10d"),
    "torchddp-plain": partial(ours, adamw),
}
# AdamW is not fused, so that all variants compute the same; it updates 2% of the GPT's parameters.
MUON: dict[str, Builder] = {
    "torch-ddp": partial(plain, TorchDDP, muon),
    "torch-zero": partial(zero, muon, parameters_as_bucket_view=True),
    "fsdp2": partial(fsdp2, muon),
    "fairscale": partial(fairscale, muon),
    "deepspeed": partial(deepspeed, muon),
    "deepspeed-standard": partial(deepspeed_standard, muon),
    "torchddp-ddp-oss": partial(ours_in_ddp, muon),
    "torchddp-auto": partial(ours, muon),
    "torchddp-c10d": partial(ours, muon, transport="c10d"),
    "gram-in-oss": partial(ours_gram, muon),
}
