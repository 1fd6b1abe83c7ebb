"""Shards a model's parameters with torch's fully_shard: its blocks first, then the rest."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from torchddp.parallel.config import ParallelConfig, nearest
from torchddp.parallel.groups import Layout
from torchddp.transport.waits import run_collective


def shard(model: nn.Module, config: ParallelConfig, layout: Layout, mesh: DeviceMesh) -> None:
    """Shard ``model`` in place over ``mesh``: over its dimension "dp", or over "mp" with replicas over "dp".

    Collective. ValueError for a class that the model doesn't have, and parameters without memory for rank 0's values.
    """
    blocks = blocks_of(model, config.wrap)
    if config.sync_module_states:
        sync_from_rank_0(model, mesh)
    both = layout.kind == "hsdp" or layout.replicates
    dtypes = [None if name is None else getattr(torch, str(name)) for name in (config.param_dtype, config.reduce_dtype)]
    pinned = mesh.device_type != "cpu"
    options: dict[str, Any] = {
        "mesh": mesh if both else mesh["dp"],
        "reshard_after_forward": layout.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1]),
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if config.cpu_offload else OffloadPolicy(),
    }
    for block in reversed(blocks):  # inner ones before those that contain them
        fully_shard(block, **options)
    # The root's own parameters are used last in forward and first in backward: freeing them in between gains nothing.
    fully_shard(model, **{**options, "reshard_after_forward": layout.reshard_after_forward and not blocks})
    _prefetch(blocks, config.forward_prefetch, config.backward_prefetch)


def blocks_of(model: nn.Module, wrap: tuple[str | type[nn.Module], ...] | None) -> list[nn.Module]:
    """The modules to shard one by one, outer ones first, in registration order; never the model itself.

    By class or class name (with or without its module). Default: the members of the model's outermost ModuleLists,
    ModuleDicts and Sequentials whose class occurs at least twice with parameters.
    """
    if wrap is None:
        return _repeated(model)
    found = []
    for wanted in wrap:
        matching = [module for module in model.modules() if _is_a(module, wanted)]
        if not matching:
            classes = dict.fromkeys(type(module).__name__ for module in model.modules())
            name = wanted if isinstance(wanted, str) else wanted.__name__
            raise ValueError(f"wrap: the model has no module of class '{name}'{nearest(name, classes)}")
        found += matching
    return [module for module in model.modules() if module is not model and any(module is other for other in found)]


def _is_a(module: nn.Module, wanted: str | type[nn.Module]) -> bool:
    if not isinstance(wanted, str):
        return isinstance(module, wanted)
    kind = type(module)
    return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")


def _repeated(module: nn.Module) -> list[nn.Module]:
    children = list(dict.fromkeys(module.children()))
    repeated: list[nn.Module] = []
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        classes = [type(child) for child in children if next(child.parameters(), None) is not None]
        repeated = [child for child in children if classes.count(type(child)) > 1]
    found = []
    for child in children:
        found += [child] if any(child is other for other in repeated) else _repeated(child)
    return found


def sync_from_rank_0(model: nn.Module, mesh: DeviceMesh) -> None:
    """Copy rank 0's tensors to all ranks of the mesh. Collective. ValueError for tensors on the meta device."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        raise ValueError(
            f"sync_module_states: '{empty[0]}' is on the meta device and has no values: set it to False, and fill in "
            "the parameters after parallelize (to_empty, then your initialization)"
        )
    dp = mesh.get_group("dp")
    if "mp" in (mesh.mesh_dim_names or ()):
        mp: dist.ProcessGroup | None = mesh.get_group("mp")
    else:  # the mesh of the model's own plan
        mp = next((tensor.device_mesh.get_group() for tensor in tensors.values() if isinstance(tensor, DTensor)), None)
    for tensor in tensors.values():
        if isinstance(tensor, DTensor):
            _broadcast(tensor.to_local(), dp)
        else:
            _broadcast(tensor, dp)
            if mp is not None:
                _broadcast(tensor, mp)


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    if group.size() == 1:
        return
    values = tensor.detach()
    dense = values.contiguous()
    send = partial(dist.broadcast, dense, group=group, group_src=0, async_op=True)
    run_collective(send, group, "sending the first rank's values")
    if dense is not values:
        values.copy_(dense)


def _prefetch(blocks: list[nn.Module], forward: int, backward: int) -> None:
    modules: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for number, module in enumerate(modules):
        if forward:
            module.set_modules_to_forward_prefetch(modules[number + 1 : number + 1 + forward])
        if backward:
            module.set_modules_to_backward_prefetch(modules[max(0, number - backward) : number][::-1])
