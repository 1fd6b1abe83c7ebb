"""Builds each variant around a model, torch's and ours. All functions are collective."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import AdamW

from benchmarks.sharded import field, peers
from benchmarks.sharded.trainer import LEARNING_RATE, Trainer
from torchddp.harness.variants import TUNED_OPTIONS, Variant, load_class
from torchddp.optim import OSS


def tuned_options() -> dict[str, Any]:
    """torch DDP's fastest options, as far as this torch supports them."""
    known = inspect.signature(TorchDDP.__init__).parameters
    return {key: value for key, value in TUNED_OPTIONS.items() if key in known}


def _ddp(variant: Variant, module: nn.Module) -> nn.Module:
    assert variant.class_path is not None
    options = tuned_options() if variant.class_path == field.TORCH_DDP else {}
    wrapped: nn.Module = load_class(variant.class_path)(module, **options)
    return wrapped


def _plain(variant: Variant, module: nn.Module) -> Trainer:
    wrapped = _ddp(variant, module)
    return Trainer(variant, wrapped, module, AdamW(module.parameters(), lr=LEARNING_RATE, **variant.keywords))


def _zero(variant: Variant, module: nn.Module) -> Trainer:
    wrapped = _ddp(variant, module)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), AdamW, lr=LEARNING_RATE, **variant.keywords)
    return Trainer(variant, wrapped, module, optimizer)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: children with parameters of each nn.Sequential, outermost first."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.Sequential):
            found += [block for block in child if any(True for _ in block.parameters())]
        else:
            found += blocks_of(child)
    return found


def _fully_sharded(variant: Variant, module: nn.Module) -> Trainer:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks_of(module):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return Trainer(variant, module, module, AdamW(module.parameters(), lr=LEARNING_RATE, **variant.keywords))


def _sharded_by_us(variant: Variant, module: nn.Module) -> Trainer:
    options = variant.keywords
    wrapper = {key: options.pop(key) for key in ("transport",) if key in options}
    optimizer = OSS(module.parameters(), optim=AdamW, lr=LEARNING_RATE, **options)
    wrapped = load_class(field.SHARDED)(module, optimizer, **wrapper)
    return Trainer(variant, wrapped, module, optimizer)


BUILDERS: dict[str, Callable[[Variant, nn.Module], Trainer]] = {
    field.PLAIN: _plain,
    field.ZERO: _zero,
    field.FULLY_SHARDED: _fully_sharded,
    field.SHARDED_BY_US: _sharded_by_us,
    field.FAIRSCALE_KIND: peers.build_fairscale,
    field.DEEPSPEED_KIND: peers.build_deepspeed,
}


def prepare(variant: Variant) -> None:
    """Import the variant's package; propagates import errors."""
    if field.FIELD[variant.name].kind == field.DEEPSPEED_KIND:
        peers.import_deepspeed()
    elif variant.class_path is not None:
        load_class(variant.class_path)


def build(variant: Variant, module: nn.Module) -> Trainer:
    """Builds the variant around this model, which it may modify."""
    prepare(variant)
    return BUILDERS[field.FIELD[variant.name].kind](variant, module)
