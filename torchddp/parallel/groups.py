"""What a config means for a given world size: which ranks hold which part of a model, and their groups."""

from __future__ import annotations

import datetime
import os
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchddp.parallel.config import ParallelConfig
from torchddp.transport.agreement import StoreExchange, ranks_of_hosts
from torchddp.transport.store import part_of_store


@dataclass(frozen=True)
class Layout:
    """The kind of parallelism, and the two sizes whose product is the number of ranks.

    Rank r has index ``r % model_parallel`` in its model-parallel group of neighbors, and ``r // model_parallel`` in the
    other.
    """

    kind: str  # none, ddp, sharded, fsdp, hsdp
    data_parallel: int
    model_parallel: int
    replicates: bool = False  # fsdp: a mesh whose second dimension has one rank
    reshard_after_forward: bool = True


def plan_layout(config: ParallelConfig, world_size: int, ranks_of_a_host: int, tensor_parallel: bool) -> Layout:
    """The layout of ``config`` for ``world_size`` ranks.

    ``ranks_of_a_host``: HSDP's default model-parallel group. ``tensor_parallel``: parameters are already DTensors.
    ValueError: sizes whose product isn't the world size, or model parallelism that doesn't fit the kind.
    """
    kind, data_parallel = config.chosen_kind, config.data_parallel
    model_parallel = config.model_parallel or 1
    if config.model_parallel is None and kind == "hsdp":
        # One group per host if all hosts have the same number of ranks; otherwise one group of all ranks.
        model_parallel = ranks_of_a_host if world_size % ranks_of_a_host == 0 else world_size
        if data_parallel is not None:
            model_parallel = max(1, world_size // data_parallel)
    if data_parallel is None:
        data_parallel = max(1, world_size // model_parallel)
    if data_parallel * model_parallel != world_size:
        raise ValueError(
            f"data_parallel {data_parallel} x model_parallel {model_parallel} is {data_parallel * model_parallel}, but "
            f"there are {world_size} ranks: their product must be the number of ranks (or leave data_parallel out)"
        )
    if world_size > 1:
        _check_plan(kind, model_parallel, tensor_parallel)
    if world_size == 1 or (kind == "ddp" and data_parallel == 1):
        kind = "none"  # nothing to average
    strategy = config.sharding_strategy
    return Layout(
        kind,
        data_parallel,
        model_parallel,
        replicates=strategy == "NO_SHARD",
        reshard_after_forward=strategy not in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "NO_SHARD"),
    )


def _check_plan(kind: str, model_parallel: int, tensor_parallel: bool) -> None:
    if tensor_parallel:
        if kind in ("sharded", "hsdp"):
            raise ValueError(f"kind '{kind}' on a model of DTensors: allowed: 'ddp' and 'fsdp' over the mesh's 'dp'")
        if model_parallel == 1:
            raise ValueError("the parameters are DTensors, but model_parallel is 1: set it to the ranks of their plan")
    elif model_parallel > 1 and kind in ("ddp", "fsdp", "sharded"):
        raise ValueError(
            f"model_parallel {model_parallel} with kind '{kind}' on a model without a tensor parallel plan: call "
            "parallelize_module(model, torchddp.parallel.device_mesh(config)['mp'], plan) first, or use kind 'hsdp' "
            "to shard each copy over these ranks"
        )


@dataclass(frozen=True)
class GroupInfo:
    """A group of ranks that contains this one.

    Attributes:
        rank, world_size: this rank's number in the group, and the number of ranks in the group.
        global_rank, global_ranks: this rank's number in the whole job, and those of all members, in the group's order.
        group: the process group; None if this rank is the only member.
    """

    rank: int
    world_size: int
    global_rank: int
    global_ranks: tuple[int, ...]
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class ParallelGroupInfo:
    """The two groups that this rank belongs to.

    Attributes:
        mp: the ranks that together hold one copy of the model.
        dp: the ranks that hold the same part of different copies.
    """

    mp: GroupInfo
    dp: GroupInfo


@dataclass(frozen=True)
class Groups:
    world: weakref.ref[dist.ProcessGroup] | None  # the process group in which they were created
    key: tuple[object, ...]
    mesh: DeviceMesh | None  # None: without a process group

    def is_of(self, world: dist.ProcessGroup | None) -> bool:
        return (None if self.world is None else self.world()) is world


_opened: list[Groups] = []
of_models: weakref.WeakKeyDictionary[nn.Module, Groups] = weakref.WeakKeyDictionary()
# as long as torch's stores wait, because some ranks' models may take longer to build
_HOSTS_TIMEOUT = datetime.timedelta(minutes=10)
_host_sizes: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def device_mesh(config: ParallelConfig) -> DeviceMesh:
    """The mesh of ``config``, for tensor parallel plans: "dp" and, with model parallelism, the inner dimension "mp".

    The first call for a layout is collective and creates its process groups; `parallelize` with the same config reuses
    them. ``config.device_type`` None: "cuda" if there is one, else "cpu". RuntimeError without a process group,
    ValueError for sizes that don't multiply to the world size.
    """
    require_process_group()
    if not dist.is_initialized():
        raise RuntimeError("a mesh needs a process group: call torch.distributed.init_process_group first")
    wants_plan = config.chosen_kind in ("ddp", "fsdp") and (config.model_parallel or 1) > 1
    layout = layout_here(config, wants_plan)
    mesh = open_groups(layout, config, config.device_type or ("cuda" if torch.cuda.is_available() else "cpu")).mesh
    assert mesh is not None
    return mesh


def parallel_group_info(model: nn.Module | DeviceMesh) -> ParallelGroupInfo:
    """The groups of a model, or of a mesh. Not collective.

    In a single process both contain this rank alone.

    Args:
        model: what `parallelize` has returned, or a mesh from `device_mesh`.

    Raises:
        RuntimeError: the model did not come from `parallelize`, or the process group was destroyed since.
    """
    if isinstance(model, DeviceMesh):
        return _info_of(model)
    groups = of_models.get(model)
    if groups is None or not groups.is_of(dist.group.WORLD):
        raise RuntimeError(
            f"this {type(model).__name__} has no data- and model-parallel groups: pass the model that "
            "torchddp.parallelize returned after init_process_group"
        )
    return _info_of(groups.mesh)


def open_groups(layout: Layout, config: ParallelConfig, device_type: str) -> Groups:
    """The groups of a layout. Collective unless they already exist, or there is no process group."""
    world = dist.group.WORLD
    two = layout.model_parallel > 1 or layout.kind == "hsdp" or layout.replicates
    key = (layout.data_parallel, layout.model_parallel, two, device_type, config.parallel_backend)
    _opened[:] = [groups for groups in _opened if groups.is_of(world)]
    found = next((groups for groups in _opened if groups.key == key), None)
    if found is None:
        mesh = None if world is None else _new_mesh(layout, two, config.parallel_backend, device_type)
        found = Groups(None if world is None else weakref.ref(world), key, mesh)
        _opened.append(found)
    return found


def _new_mesh(layout: Layout, two: bool, backend: str | None, device_type: str) -> DeviceMesh:
    names = ("dp", "mp") if two else ("dp",)
    shape = (layout.data_parallel, layout.model_parallel)[: len(names)]
    override = None if backend is None else dict.fromkeys(names, backend)
    return init_device_mesh(device_type, shape, mesh_dim_names=names, backend_override=override)  # type: ignore[arg-type]


def _info_of(mesh: DeviceMesh | None) -> ParallelGroupInfo:
    global_rank = 0 if mesh is None else dist.get_rank()
    alone = GroupInfo(0, 1, global_rank, (global_rank,), None)
    if mesh is None:
        return ParallelGroupInfo(mp=alone, dp=alone)
    found = {}
    for name in mesh.mesh_dim_names or ():
        group = mesh.get_group(name)
        ranks = tuple(dist.get_process_group_ranks(group))
        shown = group if len(ranks) > 1 else None
        found[name] = GroupInfo(ranks.index(global_rank), len(ranks), global_rank, ranks, shown)
    return ParallelGroupInfo(mp=found.get("mp", alone), dp=found["dp"])


def require_process_group() -> None:
    """RuntimeError if a launcher has started several processes and there is no process group."""
    if dist.is_initialized():
        return
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        started = os.environ.get(name, "1")
        if started.isdigit() and int(started) > 1:
            raise RuntimeError(f"{name} is {started}, but there is no process group: call init_process_group first")


def layout_here(config: ParallelConfig, tensor_parallel: bool) -> Layout:
    """`plan_layout` for the current ranks. With HSDP, the first call in a process group is collective."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    of_a_host = ranks_of_a_host() if config.chosen_kind == "hsdp" else world_size
    return plan_layout(config, world_size, of_a_host, tensor_parallel)


def ranks_of_a_host() -> int:
    """The number of ranks per host if all hosts have as many, consecutive ones; otherwise the world size.

    The first call in a process group is collective, through the store: a launcher only knows the ranks it started.
    """
    world = dist.group.WORLD
    if world is None or world.size() == 1:
        return 1
    if world not in _host_sizes:
        store = part_of_store(world, "hosts")
        hosts = ranks_of_hosts(StoreExchange(store, world.rank(), world.size(), _HOSTS_TIMEOUT, "parallelize()"))
        size = len(hosts[0])
        are_blocks = all(ranks == list(range(size * n, size * (n + 1))) for n, ranks in enumerate(hosts))
        _host_sizes[world] = size if are_blocks else world.size()
    return _host_sizes[world]
