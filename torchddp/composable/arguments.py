"""Whether `replicate` can do what it is asked for, and with which ranks and parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed._composable.contract import _get_registry
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp.composable.module import ReplicateModule, find_state
from torchddp.ddp.local_tensors import is_dtensor
from torchddp.ddp.module import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Of DistributedDataParallel's, with what stands in their place.
INSTEAD = {
    "device_mesh": "mesh=",
    "process_group": "mesh=",
    "mixed_precision": "mp_policy=",
    "device_ids": "device_id=",
    "output_device": "no argument: outputs stay where the module makes them",
    "dim": "no argument: it was for several devices a process",
    "check_reduction": "no argument: it is deprecated and does nothing",
    "broadcast_buffers": "forward_sync_buffers=",
    "delay_all_reduce_named_params": "ignored_params= and a reduction of your own",
    "param_to_hook_all_reduce": "ignored_params= and a reduction of your own",
}
OPTIONS = frozenset(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", "module", *INSTEAD}


def check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in INSTEAD:
            raise TypeError(f"replicate() has no argument {name!r}: use {INSTEAD[name]}")
        if name not in OPTIONS:
            raise TypeError(f"replicate() has no argument {name!r}; its options are {', '.join(sorted(OPTIONS))}")


def check_module(module: Any) -> None:
    """TypeError, ValueError or RuntimeError for what can't be replicated."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"replicate() wants one torch.nn.Module, got {type(module).__name__}")
    kind = type(module).__name__
    if isinstance(module, ReplicateModule):
        raise RuntimeError(f"this {kind} is already replicated. torchddp.composable.unreplicate() undoes it.")
    taken = {"fully_shard", "replicate"} & set(_get_registry(module) or ())
    if taken:
        raise RuntimeError(f"this {kind} was given to torch's {taken.pop()}() already, which reduces its gradients")
    inner = next((name for name, m in module.named_modules() if isinstance(m, TorchDDP)), None)
    if inner is not None:
        where = f"contains a DistributedDataParallel ({inner!r})" if inner else "is a DistributedDataParallel"
        raise RuntimeError(f"this {kind} {where}: its gradients would be reduced twice. Replicate the model inside.")
    if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)) and (
        type(module).forward in (torch.nn.Module.forward, torch.nn.ModuleList.forward, torch.nn.ModuleDict.forward)
    ):
        raise ValueError(
            f"a {kind} has no forward, and what replicate() adds happens around it: replicate its members, or the "
            "module that holds it"
        )


def group_of(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The process group of a mesh of one dimension; None: the default group."""
    if mesh is None:
        return None
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        raise ValueError(
            f"replicate() wants a mesh of one dimension, the one that it replicates over; got one of shape "
            f"{tuple(mesh.mesh.shape)} with dimensions {', '.join(names)}. Pass one of them, e.g. "
            f"mesh[{names[0]!r}]"
            + ("." if mesh.mesh_dim_names else ", after giving them names with init_device_mesh(mesh_dim_names=...).")
        )
    return mesh.get_group()


def left_to_others(
    module: torch.nn.Module,
    ignored_modules: Iterable[torch.nn.Module] | None,
    ignored_params: Iterable[torch.nn.Parameter] | None,
) -> tuple[set[int], set[str]]:
    """The ids of parameters and buffers that this call leaves alone, and all their names.

    Of ignored modules, and of those inside that are replicated or sharded by themselves.
    """
    ignored = list(ignored_modules or ())
    wrong = [type(m).__name__ for m in ignored if not isinstance(m, torch.nn.Module)]
    if wrong:
        raise TypeError(f"ignored_modules must be modules, got {', '.join(wrong)}")
    own_way = [m for m in module.modules() if find_state(m) is not None or "fully_shard" in (_get_registry(m) or {})]
    ids = {id(p) for p in ignored_params or ()}
    for other in [*ignored, *own_way]:
        ids |= {id(t) for t in [*other.parameters(), *other.buffers()]}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return ids, {name for name, tensor in named if id(tensor) in ids}


def check_parameters(
    module: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter], mesh: DeviceMesh | None, rank: int
) -> None:
    """Of those that gradients are reduced of."""
    kind = type(module).__name__
    if not any(p.requires_grad for p in parameters.values()):
        raise RuntimeError(
            f"this {kind} has no parameter that requires grad and is not ignored (rank {rank}): nothing to replicate"
        )
    on_meta = [name for name, p in parameters.items() if p.device.type == "meta"]
    if on_meta:
        raise RuntimeError(
            f"{len(on_meta)} parameters of this {kind} are on the meta device, without values ({', '.join(on_meta[:4])}"
            "): give them memory by module.to_empty(device=...) and initialise them, then replicate"
        )
    if mesh is not None:
        elsewhere = sorted({p.device.type for p in parameters.values()} - {mesh.device_type})
        if elsewhere:
            raise ValueError(
                f"the mesh is one of {mesh.device_type} devices, parameters of this {kind} are on "
                f"{', '.join(elsewhere)}: move the module first, or make the mesh for its devices"
            )
    _check_dtensors(parameters, mesh)


def _check_dtensors(parameters: Mapping[str, torch.nn.Parameter], mesh: DeviceMesh | None) -> None:
    ranks = set(range(dist.get_world_size())) if mesh is None else set(mesh.mesh.flatten().tolist())
    for name, parameter in parameters.items():
        if is_dtensor(parameter):
            theirs: DeviceMesh = parameter.device_mesh  # type: ignore[attr-defined]
            shared = ranks & set(theirs.mesh.flatten().tolist())
            if len(shared) > 1:
                raise ValueError(
                    f"parameter {name!r} is a DTensor over ranks {sorted(theirs.mesh.flatten().tolist())}, and "
                    f"replicate() is to average over ranks {sorted(ranks)}: they may have only one in common. "
                    "Make a mesh of two dimensions and give one to each: parallelize_module(module, mesh['tp'], ...), "
                    "then replicate(module, mesh=mesh['dp'])"
                )


def check_wire_dtype(wire_dtype: torch.dtype | None, options: Mapping[str, Any]) -> None:
    """``wire_dtype``: what a policy wants gradients to be cast to on their way; None: nothing."""
    for name in ("comm_hook", "wire_dtype") if wire_dtype is not None else ():
        if options.get(name):
            raise ValueError(
                f"mp_policy reduces gradients in {wire_dtype} by a communication hook, which does not go with {name}=. "
                "Give it a reduce_dtype= equal to the parameters' own dtype, which needs no hook."
            )
