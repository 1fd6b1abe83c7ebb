"""parallelize: apply a ParallelConfig to a model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeAlias, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torchddp import _torch
from torchddp.averaging.flat import broadcast_from_first
from torchddp.composable import replicate
from torchddp.ddp.former_names import SETTINGS
from torchddp.ddp.module import DistributedDataParallel
from torchddp.optim import OSS
from torchddp.parallel import groups
from torchddp.parallel.config import ParallelConfig, nearest
from torchddp.sharded import ShardedDataParallel
from torchddp.transport.agreement import Agreement, in_words

OptimizerFactory: TypeAlias = "Callable[..., Optimizer]"


@overload
def parallelize(model: nn.Module, config: ParallelConfig | None = None, optimizer: None = None) -> nn.Module: ...


@overload
def parallelize(
    model: nn.Module, config: ParallelConfig | None = None, *, optimizer: OptimizerFactory
) -> tuple[nn.Module, Optimizer]: ...


def parallelize(
    model: nn.Module, config: ParallelConfig | None = None, optimizer: OptimizerFactory | None = None
) -> nn.Module | tuple[nn.Module, Optimizer]:
    """Make the model parallel as ``config`` says. Collective, with the same config on all ranks.

    Example:

        import functools

        config = torchddp.ParallelConfig(kind="sharded")
        adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
        model, optimizer = torchddp.parallelize(module, config, optimizer=adamw)
        loss_of(model(batch)).backward()
        optimizer.step()

    With one process or no process group, returns the module itself. Otherwise it returns a `DistributedDataParallel`, a
    `ShardedDataParallel` (ZeRO-2, Rajbhandari et al. 2020), or the same module with its parameters sharded by torch's
    ``fully_shard`` (FSDP2, Zhao et al. 2023; with replicas: HSDP). `parallel_group_info` reports the model's groups.

    Args:
        model: already on its device. With tensor parallelism: after ``parallelize_module`` over
            ``torchddp.parallel.device_mesh(config)["mp"]``.
        config: None: DistributedDataParallel with its defaults.
        optimizer: a class or ``functools.partial`` of one, called with the final parameters; the result is then a pair.
            Kind "sharded" requires it, and makes a `torchddp.optim.OSS` of that class.

    Raises:
        ValueError: sizes that don't multiply to the world size, model parallelism for a model without a plan for it, a
            model that is already parallel, a missing optimizer, or another config of the same sizes on another rank.
        TypeError: a config or optimizer of the wrong type, or an existing one, whose parameters sharding replaces.
        RuntimeError: a launcher started several processes, but ``init_process_group`` was not called; on ranks whose
            groups agree, while the configs of others differ.
    """
    config = ParallelConfig() if config is None else config
    if not isinstance(config, ParallelConfig):
        raise TypeError(f"config: got a {type(config).__name__}, allowed: a ParallelConfig")
    _check_optimizer(optimizer)
    _check_model(model)
    groups.require_process_group()
    has_dtensors = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    layout = groups.layout_here(config, has_dtensors)
    if layout.kind == "sharded" and optimizer is None:
        raise ValueError("kind 'sharded' shards the optimizer's state: pass optimizer=functools.partial(AdamW, lr=...)")
    opened = groups.open_groups(layout, config, config.device_type or _device_type(model))
    if opened.mesh is not None:
        _compare(config, layout, opened.mesh)
    made: Optimizer | None = None
    if layout.kind != "none":
        assert opened.mesh is not None
        if layout.kind == "sharded":
            assert optimizer is not None
            model, made = _shard_states(model, config, optimizer, opened.mesh)
        else:
            model = _apply(model, config, layout, opened.mesh)
    groups.of_models[model] = opened
    return model if optimizer is None else (model, made or optimizer(model.parameters()))


def _compare(config: ParallelConfig, layout: groups.Layout, mesh: DeviceMesh) -> None:
    """Collective: an error on all ranks unless they use the same method."""
    fields = ("sharding_strategy", "sync_module_states", "param_dtype", "reduce_dtype", "wrap")
    options = {"kind": layout.kind, **{name: in_words(getattr(config, name)) for name in fields}}
    with contextlib.ExitStack() as stack:  # an error in one group reaches those that its ranks are also in
        device = torch.device(mesh.device_type)
        last, *others = [Agreement("parallelize", group, device) for group in mesh.get_all_groups()]
        for agreement in others:
            stack.enter_context(agreement)
        for agreement in (last, *others):
            agreement.verify(options=options)


def _apply(model: nn.Module, config: ParallelConfig, layout: groups.Layout, mesh: DeviceMesh) -> nn.Module:
    if layout.kind in ("fsdp", "hsdp"):
        _shard_fully(model, config, layout, mesh)
        return model
    options = {"init_sync": config.sync_module_states, **_wrapper_options(config)}
    if layout.model_parallel > 1:
        # Parameters of a tensor parallel plan are DTensors, which replicate() keeps.
        return replicate(model, mesh=mesh["dp"], **options)
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"), **options)


def _shard_states(
    model: nn.Module, config: ParallelConfig, optimizer: OptimizerFactory, mesh: DeviceMesh
) -> tuple[nn.Module, Optimizer]:
    group = mesh.get_group("dp")
    given = optimizer if isinstance(optimizer, functools.partial) else functools.partial(optimizer)
    cls, options = given.func, given.keywords
    if given.args or not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise TypeError(f"optimizer: got {optimizer!r}; kind 'sharded' needs a class, or a partial with only keywords")
    if not issubclass(cls, OSS):
        options = {**options, "optim": cls}
        cls = OSS
    sharded = cls(model.parameters(), group=group, **options)
    options = {"sync_models_at_startup": config.sync_module_states, **_wrapper_options(config)}
    return ShardedDataParallel(model, sharded, process_group=group, **options), sharded


def _wrapper_options(config: ParallelConfig) -> dict[str, Any]:
    """`ParallelConfig.ddp`, with values that files can't hold converted from what they do hold."""
    options: dict[str, Any] = {}
    fields: dict[str, dict[str, Any]] = {}
    for name, value in config.ddp.items():
        argument, _, field = name.partition(".")
        if field:
            fields.setdefault(argument, {})[field] = _dtype(field, value) if field in _DTYPES else value
        else:
            options[name] = value
    return options | {argument: SETTINGS[argument](**given) for argument, given in fields.items()}


_DTYPES = {"wire": ("bfloat16", "float16"), "reduce": ("float32",), "main_grads": ("float32",)}


def _dtype(name: str, given: str | torch.dtype | None) -> torch.dtype | None:
    if not isinstance(given, str):
        return given
    if given not in _DTYPES[name]:
        raise ValueError(f"ddp.precision.{name}: got '{given}', allowed: {', '.join(_DTYPES[name])}, none")
    dtype: torch.dtype = getattr(torch, given)
    return dtype


def _check_optimizer(optimizer: object) -> None:
    if isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"optimizer: got an existing {kind}; allowed: its class, or functools.partial of it")
    if optimizer is not None and not callable(optimizer):
        raise TypeError(f"optimizer: got a {type(optimizer).__name__}, allowed: a class, or functools.partial of one")


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got a {type(model).__name__}, allowed: a torch.nn.Module")
    for name, module in model.named_modules():
        wrapped = isinstance(module, nn.parallel.DistributedDataParallel | FSDPModule)
        if wrapped or "replicate" in (_torch.get_registry(module) or {}):
            where = f"its module '{name}'" if name else "the model"
            raise ValueError(f"{where} is already parallel (a {type(module).__name__}): pass the bare model")


def _device_type(model: nn.Module) -> str:
    """The device type of the parameters; parameters on the meta device will go where this process computes."""
    found = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if found == "meta" else found


# --- torch's fully_shard: the model's blocks first, then the rest ---


def _shard_fully(model: nn.Module, config: ParallelConfig, layout: groups.Layout, mesh: DeviceMesh) -> None:
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
    found: set[int] = set()  # by id: modules may define ==, as metrics do
    for wanted in wrap:
        matching = [module for module in model.modules() if _is_a(module, wanted)]
        if not matching:
            classes = dict.fromkeys(type(module).__name__ for module in model.modules())
            name = wanted if isinstance(wanted, str) else wanted.__name__
            raise ValueError(f"wrap: the model has no module of class '{name}'{nearest(name, classes)}")
        found.update(map(id, matching))
    return [module for module in model.modules() if module is not model and id(module) in found]


def _is_a(module: nn.Module, wanted: str | type[nn.Module]) -> bool:
    if not isinstance(wanted, str):
        return isinstance(module, wanted)
    kind = type(module)
    return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")


def _repeated(module: nn.Module) -> list[nn.Module]:
    children = list(dict.fromkeys(module.children()))
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    classes = [type(child) for child in children if is_list and next(child.parameters(), None) is not None]
    found = []
    for child in children:
        found += [child] if classes.count(type(child)) > 1 else _repeated(child)
    return found


def sync_from_rank_0(model: nn.Module, mesh: DeviceMesh) -> None:
    """Copy rank 0's tensors to all ranks of the mesh. Collective. ValueError for tensors on the meta device."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    if empty := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise ValueError(
            f"sync_module_states: '{empty[0]}' is on the meta device and has no values: set it to False, and fill in "
            "the parameters after parallelize (to_empty, then your initialization)"
        )
    dp = mesh.get_group("dp")
    if "mp" in (mesh.mesh_dim_names or ()):
        mp: dist.ProcessGroup | None = mesh.get_group("mp")
    else:  # the mesh of the model's own plan
        mp = next((tensor.device_mesh.get_group() for tensor in tensors.values() if isinstance(tensor, DTensor)), None)
    broadcast_from_first([t.to_local() if isinstance(t, DTensor) else t for t in tensors.values()], dp)
    if mp is not None:
        broadcast_from_first([t for t in tensors.values() if not isinstance(t, DTensor)], mp)


def _prefetch(blocks: list[nn.Module], forward: int, backward: int) -> None:
    modules: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for number, module in enumerate(modules):
        if forward:
            module.set_modules_to_forward_prefetch(modules[number + 1 : number + 1 + forward])
        if backward:
            module.set_modules_to_backward_prefetch(modules[max(0, number - backward) : number][::-1])
