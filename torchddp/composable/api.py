"""`replicate`: data parallelism for a module that keeps its class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp import _torch
from torchddp.composable.engine import ReplicateEngine, ReplicatePolicy
from torchddp.composable.module import (
    ReplicateModule,
    find_state,
    forget,
    make_replicated,
    state_of,
)
from torchddp.composable.precision import reduce_in
from torchddp.ddp.checks import ChecksChoice
from torchddp.ddp.former_names import accepts_former_names
from torchddp.ddp.grad_precision import Precision
from torchddp.ddp.hooks import HookChoice
from torchddp.ddp.model import check_group, device_of, group_of, is_dtensor
from torchddp.ddp.module import OPTIONS
from torchddp.ddp.options import BucketCap, DDPSyncStrategy, SyncChoice, TransportChoice
from torchddp.durations import Duration
from torchddp.errors import listed
from torchddp.transport.agreement import Agreement

M = TypeVar("M", bound=torch.nn.Module)
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # where DistributedDataParallel looks for names
_OF_THE_WRAPPER = "torchddp.DistributedDataParallel(module, precision=...), whose zero_grad() clears main gradients"
# DistributedDataParallel's arguments, and what replaces them here.
_INSTEAD: Final = {
    "device_mesh": "mesh=",
    "process_group": "mesh=",
    "mixed_precision": "mp_policy=",
    "reduce_dtype": "mp_policy=MixedPrecisionPolicy(reduce_dtype=...)",
    "main_grads": _OF_THE_WRAPPER,
    "main_grads_as": _OF_THE_WRAPPER,
    "device_ids": "device_id=",
    "output_device": "no argument: outputs stay where the module creates them",
    "dim": "no argument: it was for several devices per process",
    "check_reduction": "no argument: it is deprecated and does nothing",
    "broadcast_buffers": "forward_sync_buffers=",
    "delay_all_reduce_named_params": "ignored_params= and a reduction of your own",
    "param_to_hook_all_reduce": "ignored_params= and a reduction of your own",
}


@accepts_former_names(**_INSTEAD)
def replicate(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_modules: Iterable[torch.nn.Module] | None = None,
    ignored_params: Iterable[torch.nn.Parameter] | None = None,
    device_id: int | torch.device | None = None,
    init_sync: bool = True,
    bucket_cap_mb: BucketCap = None,
    bucket_cap_mb_list: list[int] | None = None,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    gradient_as_bucket_view: bool | None = None,
    skip_all_reduce_unused_params: bool = False,
    batched_grad_copy: bool = False,
    forward_sync_buffers: bool | None = None,
    transport: TransportChoice = "auto",
    comm_hook: HookChoice | None = None,
    timeout: Duration | None = None,
    sync: DDPSyncStrategy | SyncChoice | None = None,
    weighted: bool = False,
    precision: Precision | None = None,
    checks: ChecksChoice = None,
    auto_refresh_trainable: bool = False,
) -> M:
    """Data parallelism as in :class:`torchddp.DistributedDataParallel`, with hooks instead of a wrapper.

    Returns ``module`` itself. Names, state dict keys, attributes, ``isinstance`` and the parameter objects stay the
    same, so the optimizer may be created before or after. The module also becomes a
    :class:`torchddp.composable.ReplicateModule`, with ``set_requires_gradient_sync`` and ``no_sync``. Submodules that
    are already replicated or sharded are left alone. A copy (deepcopy, pickle) is not replicated.

    Example:

        torchddp.replicate(module, find_unused_parameters=True)
        optimizer = torch.optim.AdamW(module.parameters())
        loss_of(module(batch)).backward()  # gradients are now averages over all ranks
        optimizer.step()

    Collective, as are forwards and backwards where those of DistributedDataParallel are.

    Args:
        mesh: one dimension: the ranks that hold the same model and average its gradients. Of a two-dimensional mesh,
            pass the one to replicate over (``mesh["dp"]``); parameters may be DTensors over the other. None: all.
        mp_policy: torch's ``MixedPrecisionPolicy``: forward and backward in ``param_dtype``, gradients reduced in
            ``reduce_dtype`` (None: in ``param_dtype``), inputs and outputs of forward cast. Parameters, ``.grad`` and
            the optimizer keep the module's dtype. None: nothing is cast.
        ignored_modules: submodules whose parameters and buffers are neither averaged, sent nor compared.
        ignored_params: single parameters to leave out in the same way.
        device_id: a GPU that forward's inputs are moved to; the CPU moves nothing (as in torch's ``replicate``).
        precision: of :class:`torchddp.Precision`, only ``wire``.

    The other arguments are those of :class:`torchddp.DistributedDataParallel`.

    Raises:
        TypeError: an unknown option (named), one that has another name here, or not a module.
        ValueError: a mesh with several dimensions or for other devices; a DTensor sharded over ranks that average
            gradients; a container without forward; options that conflict with ``mp_policy``.
        RuntimeError: the module is already replicated, sharded or wrapped, has no parameters to train, or has some on
            the meta device; models differ between ranks.

    The idea and names are those of torch's ``torch.distributed._composable.replicate`` and ``fully_shard``.
    """

    given = locals()
    options = {name: given[name] for name in OPTIONS if name in given}

    def parameters() -> dict[str, torch.nn.Parameter]:
        names = left_out()
        return {name: p for name, p in module.named_parameters() if name not in names}

    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    # These checks' errors reach all ranks, as those of the engine do.
    ranks = group_of(None, mesh) if init_sync else None
    with Agreement(ReplicatePolicy.who, ranks, device_of(module)):
        _check_module(module)
        check_group(None, mesh)
        if not isinstance(policy, MixedPrecisionPolicy):
            raise TypeError(f"mp_policy must be a MixedPrecisionPolicy (of fully_shard), got {type(policy).__name__}")
        group = _group_of(mesh)
        left_out = partial(_left_to_others, module, _checked_modules(ignored_modules), list(ignored_params or ()))
        present = parameters()
        _check_parameters(module, present, mesh, dist.get_rank())
        sent_in = _differing_dtype(policy.reduce_dtype or policy.param_dtype, present.values())
        _check_precision(precision, sent_in, comm_hook)
        device_ids = _device_ids(device_id, present.values())
    with _ignoring(module, left_out()):
        engine = ReplicateEngine(module, left_out, policy, device_ids=device_ids, process_group=group, **options)
    if sent_in is not None:
        engine.register_comm_hook(engine.process_group, reduce_in(sent_in))
    make_replicated(module).install(module, engine, policy, parameters)
    return module


def engine_of(module: torch.nn.Module) -> ReplicateEngine:
    """The engine of a replicated module, for functions that take a DistributedDataParallel, like ``check_parameters``.

    It has a reducer, ``gradient_stats()``, ``nonfinite()``, ``traffic()``, ``reduce()``; it can't be called.

    Example:

        torchddp.replicate(module, checks=torchddp.Checks(gradient_stats=True))
        loss_of(module(batch)).backward()
        norm = torchddp.composable.engine_of(module).gradient_stats()[:, 0].sum().sqrt()

    Raises:
        TypeError: the module is not replicated.
    """
    return state_of(module).engine


def unreplicate(module: M) -> M:
    """Restore the class and hooks that ``module`` had before `replicate`; parameters and gradients stay.

    Not collective. TypeError: the module is not replicated.
    """
    state = state_of(module)
    state.end_interrupted(module)
    state.remove()
    forget(module)
    return module


def _differing_dtype(dtype: torch.dtype | None, parameters: Iterable[torch.Tensor]) -> torch.dtype | None:
    """``dtype`` if any gradient has a different one, else None."""
    trained = {p.dtype for p in parameters if p.requires_grad}
    return None if dtype is None or trained == {dtype} else dtype


def _device_ids(device_id: object, parameters: Iterable[torch.Tensor]) -> list[int | torch.device] | None:
    if device_id is None:
        return None
    if isinstance(device_id, bool) or not isinstance(device_id, int | torch.device):
        raise TypeError(f"device_id must be the number of a GPU or a torch.device, got {type(device_id).__name__}")
    on_cpu = isinstance(device_id, torch.device) and device_id.type == "cpu"
    return None if on_cpu or next(iter(parameters)).device.type == "cpu" else [device_id]


@contextmanager
def _ignoring(module: torch.nn.Module, names: set[str]) -> Iterator[None]:
    """Inside this context DistributedDataParallel ignores these names in addition to the user's."""
    before = {_IGNORED: module.__dict__[_IGNORED]} if _IGNORED in module.__dict__ else {}
    module.__dict__[_IGNORED] = [*before.get(_IGNORED, ()), *names]
    try:
        yield
    finally:
        del module.__dict__[_IGNORED]
        module.__dict__.update(before)


def _check_module(module: object) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"replicate() needs a torch.nn.Module, got {type(module).__name__}")
    kind = type(module).__name__
    if isinstance(module, ReplicateModule):
        raise RuntimeError(f"this {kind} is already replicated. torchddp.composable.unreplicate() undoes it.")
    if taken := {"fully_shard", "replicate"} & set(_torch.get_registry(module) or ()):
        raise RuntimeError(f"this {kind} was already given to torch's {taken.pop()}(), which reduces its gradients")
    inner = next((name for name, m in module.named_modules() if isinstance(m, TorchDDP)), None)
    if inner is not None:
        where = f"contains a DistributedDataParallel ({inner!r})" if inner else "is a DistributedDataParallel"
        raise RuntimeError(f"this {kind} {where}: its gradients would be reduced twice. Replicate the model inside.")
    if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)) and (
        type(module).forward in (torch.nn.Module.forward, torch.nn.ModuleList.forward, torch.nn.ModuleDict.forward)
    ):
        raise ValueError(f"a {kind} has no forward for replicate() to hook: replicate its members, or its parent")


def _group_of(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    if mesh is None:
        return None
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh or None, got {mesh!r}")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        raise ValueError(
            f"replicate() needs a one-dimensional mesh of the ranks to replicate over; got one of shape "
            f"{tuple(mesh.mesh.shape)} with dimensions {', '.join(names)}. Pass one dimension, e.g. mesh[{names[0]!r}]"
            + ("." if mesh.mesh_dim_names else ", after giving them names with init_device_mesh(mesh_dim_names=...).")
        )
    return mesh.get_group()


def _left_to_others(
    module: torch.nn.Module, ignored_modules: Sequence[torch.nn.Module], ignored_params: Sequence[torch.nn.Parameter]
) -> set[str]:
    """The names of all tensors that are ignored, or belong to submodules that are replicated or sharded themselves."""
    inside = [m for m in module.modules() if m is not module]
    own_way = [m for m in inside if find_state(m) is not None or "fully_shard" in (_torch.get_registry(m) or {})]
    ids = {id(p) for p in ignored_params}
    for other in [*ignored_modules, *own_way]:
        ids |= {id(t) for t in [*other.parameters(), *other.buffers()]}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name for name, tensor in named if id(tensor) in ids}


def _checked_modules(modules: Iterable[torch.nn.Module] | None) -> list[torch.nn.Module]:
    found = list(modules or ())
    if wrong := [type(m).__name__ for m in found if not isinstance(m, torch.nn.Module)]:
        raise TypeError(f"ignored_modules must be modules, got {', '.join(wrong)}")
    return found


def _check_parameters(
    module: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter], mesh: DeviceMesh | None, rank: int
) -> None:
    kind = type(module).__name__
    if not any(p.requires_grad for p in parameters.values()):
        raise RuntimeError(
            f"this {kind} has no parameter that requires grad and is not ignored (rank {rank}): nothing to replicate"
        )
    if on_meta := [name for name, p in parameters.items() if p.device.type == "meta"]:
        raise RuntimeError(
            f"parameters of this {kind} are on the meta device, without values ({listed(on_meta)}). Give "
            "them memory by module.to_empty(device=...), initialize them, then replicate"
        )
    if mesh is not None:
        if elsewhere := sorted({p.device.type for p in parameters.values()} - {mesh.device_type}):
            where = ", ".join(elsewhere)
            raise ValueError(f"the mesh is for {mesh.device_type}, but parameters of this {kind} are on {where}")
    ranks = set(range(dist.get_world_size())) if mesh is None else set(mesh.mesh.flatten().tolist())
    for name, parameter in parameters.items():
        theirs = set(parameter.device_mesh.mesh.flatten().tolist()) if is_dtensor(parameter) else set()
        if len(ranks & theirs) > 1:
            raise ValueError(
                f"parameter {name!r} is a DTensor over ranks {sorted(theirs)}, and replicate() would average over "
                f"ranks {sorted(ranks)}: two such groups may share only one rank. Use different dimensions of one "
                "mesh: parallelize_module(module, mesh['tp'], ...), then replicate(module, mesh=mesh['dp'])"
            )


def _check_precision(precision: Precision | None, sent_in: torch.dtype | None, comm_hook: object) -> None:
    """``sent_in``: the dtype to which a policy's gradients are cast to be reduced; None: no cast."""
    asked_for = precision or Precision()
    if asked_for.main_grads is not None:
        raise ValueError(f"replicate() has no main gradients: use {_OF_THE_WRAPPER}")
    if asked_for.reduce is not None:
        raise ValueError(f"replicate() takes the dtype of reductions from its policy: use {_INSTEAD['reduce_dtype']}")
    for name, value in (("comm_hook=", comm_hook), ("Precision(wire=)", asked_for.wire)):
        if sent_in is not None and value is not None:
            raise ValueError(
                f"mp_policy reduces gradients in {sent_in} with a communication hook, which conflicts with {name}. "
                "Set its reduce_dtype= to the parameters' own dtype, which needs no hook."
            )
