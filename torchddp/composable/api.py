"""`replicate`: data parallelism for a module that stays what it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed._composable import contract
from torch.distributed.fsdp import MixedPrecisionPolicy

from torchddp.composable import arguments
from torchddp.composable.engine import ReplicateEngine
from torchddp.composable.module import NAME, forget, make_replicated, state_of
from torchddp.composable.precision import ParameterCast, reduce_in, wire_dtype_of
from torchddp.composable.state import ReplicateState

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

M = TypeVar("M", bound=torch.nn.Module)
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # where DistributedDataParallel looks for names


def replicate(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_modules: Iterable[torch.nn.Module] | None = None,
    ignored_params: Iterable[torch.nn.Parameter] | None = None,
    device_id: int | torch.device | None = None,
    **options: Any,
) -> M:
    """Data parallelism as :class:`torchddp.DistributedDataParallel` does it, by hooks in the place of a wrapper.

    ``module`` itself is returned: names of parameters, keys of its state dict and its attributes stay, ``isinstance``
    of its class holds, and its parameters are the same objects, so an optimizer may be made before or after. It is a
    :class:`torchddp.composable.ReplicateModule` too, with ``set_requires_gradient_sync`` and ``no_sync``. Modules
    inside that are replicated or sharded by themselves already are left to that. A copy (deepcopy, pickle) is a module
    of the original class, which is not replicated.

    Collective, and so are forwards and backwards where those of DistributedDataParallel are.

    Args:
        mesh: one dimension: the ranks that hold the same model and average its gradients. Of a mesh of two, pass the
            one to replicate over (``mesh["dp"]``); parameters may then be DTensors over the other. None: all ranks.
        mp_policy: torch's ``MixedPrecisionPolicy``: forward and backward in ``param_dtype``, gradients reduced in
            ``reduce_dtype`` (None: in ``param_dtype``), forward's inputs and outputs cast. Parameters, ``.grad`` and
            the optimizer keep the dtype that the module has. None: nothing is cast.
        ignored_modules: inside ``module``: their parameters and buffers are neither averaged, nor sent or compared.
        ignored_params: the same for single parameters.
        device_id: a GPU that forward's inputs are moved to, or the CPU, which moves nothing (as torch's ``replicate``).
        **options: those of :class:`torchddp.DistributedDataParallel`: ``bucket_cap_mb``, ``find_unused_parameters``,
            ``static_graph``, ``gradient_as_bucket_view``, ``init_sync``, ``forward_sync_buffers``, ``transport``,
            ``wire_dtype``, ``timeout``, ``stall_report_s``, ``gradient_stats``, ``check_parameters_every``,
            ``find_nonfinite``, ``comm_hook``, ``sync``, ...

    Raises:
        TypeError: an unknown option (names it), or one that has another name here; no module.
        ValueError: a mesh of several dimensions or for other devices; DTensors over ranks that gradients are averaged
            over; a container without forward; options that don't go with ``mp_policy``.
        RuntimeError: a module that is replicated, sharded or wrapped already, or has no parameters to train, or some on
            the meta device; ranks whose models differ.

    The idea and names are those of torch's ``torch.distributed._composable.replicate`` and ``fully_shard``.
    """
    arguments.check_options(options)
    arguments.check_module(module)
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy must be a torch.distributed.fsdp.MixedPrecisionPolicy, got {type(policy).__name__}")
    group = arguments.group_of(mesh)
    left_out, left_out_names = arguments.left_to_others(module, ignored_modules, ignored_params)
    parameters = {name: p for name, p in module.named_parameters() if id(p) not in left_out}
    arguments.check_parameters(module, parameters, mesh, dist.get_rank())
    sent_in = _differing_dtype(wire_dtype_of(policy), parameters.values())
    arguments.check_wire_dtype(sent_in, options)
    with _ignoring(module, left_out_names):
        engine = ReplicateEngine(
            module, device_ids=_device_ids(device_id, parameters.values()), process_group=group, **options
        )
    if sent_in is not None:
        engine.register_comm_hook(engine.process_group, reduce_in(sent_in))
    cast = None if policy.param_dtype is None else ParameterCast(module, parameters.values(), policy.param_dtype)
    _install(module, engine, policy, cast)
    return module


def engine_of(module: torch.nn.Module) -> ReplicateEngine:
    """The engine of a replicated module, for what wants a DistributedDataParallel: ``torchddp.check_parameters``, say.

    It has a reducer, ``gradient_stats()``, ``nonfinite()``, ``traffic()``, ``reduce()``; it can't be called.

    Raises:
        TypeError: the module is not replicated.
    """
    return state_of(module).engine


def unreplicate(module: M) -> M:
    """``module`` as it was before `replicate`: its class, its hooks. Parameters and gradients stay. Not collective.

    Raises:
        TypeError: the module is not replicated.
    """
    state = state_of(module)
    state.remove()
    forget(module)
    return module


def _install(module: Any, engine: ReplicateEngine, policy: Any, cast: ParameterCast | None) -> None:
    def mark(marked: torch.nn.Module) -> torch.nn.Module:
        make_replicated(marked)
        return marked

    mark.__name__ = NAME
    composable = contract(state_cls=ReplicateState)(mark)
    composable(module)
    composable.state(module).install(module, engine, policy, cast)


def _differing_dtype(dtype: torch.dtype | None, parameters: Iterable[torch.Tensor]) -> torch.dtype | None:
    """``dtype``, if any gradient is of another."""
    trained = {p.dtype for p in parameters if p.requires_grad}
    return None if dtype is None or trained == {dtype} else dtype


def _device_ids(device_id: Any, parameters: Iterable[torch.Tensor]) -> list[Any] | None:
    if device_id is None:
        return None
    if isinstance(device_id, bool) or not isinstance(device_id, int | torch.device):
        raise TypeError(f"device_id must be the number of a GPU or a torch.device, got {type(device_id).__name__}")
    on_cpu = isinstance(device_id, torch.device) and device_id.type == "cpu"
    return None if on_cpu or next(iter(parameters)).device.type == "cpu" else [device_id]


@contextmanager
def _ignoring(module: torch.nn.Module, names: set[str]) -> Iterator[None]:
    """Inside, DistributedDataParallel leaves these out, besides those that the user named there."""
    before = module.__dict__.get(_IGNORED)
    module.__dict__[_IGNORED] = [*(before or ()), *names]
    try:
        yield
    finally:
        if before is None:
            del module.__dict__[_IGNORED]
        else:
            module.__dict__[_IGNORED] = before
