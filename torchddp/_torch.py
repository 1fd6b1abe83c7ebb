"""torch's private names that torchddp uses: no other module names them, but for what `DistributedDataParallel` and its
parts use of the class they derive from. `make wheel-test` imports them with other versions of torch.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import _amp_foreach_non_finite_check_and_unscale_ as amp_unscale_
from torch import _disable_dynamo as disable_dynamo
from torch import _foreach_copy_ as foreach_copy_
from torch import _foreach_sub_ as foreach_sub_
from torch import _foreach_zero_ as foreach_zero_
from torch._C import DisableTorchFunctionSubclass as without_subclasses
from torch._C import Future as CFuture  # base class of torch.futures.Future, which Work.get_future() returns
from torch._C import _are_functorch_transforms_active as in_functorch
from torch._C import _current_graph_task_id, _get_dispatch_mode, _TorchDispatchModeKey
from torch._C import _set_grad_enabled as set_grad_enabled
from torch._C._distributed_c10d import Backend, _SymmetricMemory
from torch._C._dynamo import eval_frame
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import _profiler_enabled as profiler_enabled
from torch.autograd import _unsafe_preserve_version_counter as keep_versions
from torch.distributed import _DEFAULT_FIRST_BUCKET_BYTES as FIRST_BUCKET_BYTES
from torch.distributed import _broadcast_coalesced as broadcast_coalesced
from torch.distributed import _Work as Work  # can be derived from, unlike dist.Work
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, contract
from torch.distributed._composable.contract import _get_registry as get_registry
from torch.distributed._composable_state import _State as State
from torch.distributed.algorithms.join import _JoinConfig as JoinConfig
from torch.distributed.distributed_c10d import _get_process_group_store as store_of
from torch.distributed.distributed_c10d import _hash_ranks_to_str as hash_of_ranks
from torch.distributed.distributed_c10d import _rank_not_in_group as rank_not_in_group
from torch.distributed.distributed_c10d import _world
from torch.distributed.utils import _apply_to_tensors as apply_to_tensors
from torch.distributed.utils import _cast_forward_inputs as cast_forward_inputs
from torch.distributed.utils import _to_kwargs as to_kwargs
from torch.nn.modules.batchnorm import _NormBase as BatchNormBase
from torch.nn.parallel.distributed import _cast_buffers as cast_buffers
from torch.nn.parallel.distributed import _DDPSink, _tree_flatten_with_rref, _tree_unflatten_with_rref
from torch.nn.parallel.distributed import _find_tensors as find_tensors
from torch.nn.parallel.distributed import _MixedPrecision as MixedPrecision
from torch.nn.parallel.distributed import _setup_mixed_precision_params as setup_mixed_precision_params
from torch.utils._pytree import tree_map_only

T = TypeVar("T")
MODULE_CALL = torch.nn.Module._call_impl.__code__  # of every call of a module


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether torch made the group and has not destroyed it."""
    return group in _world.pg_map


def name_of(group: dist.ProcessGroup) -> str:
    """The name that torch gave the group; empty if `is_alive` is false."""
    return _world.pg_names.get(group, "")


def groups_by_name() -> dict[str, dist.ProcessGroup]:
    return {name: group for group, name in _world.pg_names.items()}


def flight_record() -> list[dict[str, Any]]:
    """torch's record of the last collectives; only gloo writes it. The first time takes a second, for the stacks."""
    dumped = torch._C._distributed_c10d._dump_fr_trace(True, True, False)  # type: ignore[attr-defined]
    found: list[dict[str, Any]] = pickle.loads(dumped).get("entries", [])
    return found


# From torch 2.14 on, the next group's name derives from a count of this rank's groups, not from how many there are.
_COUNTS_GROUPS = "group_count" in hash_of_ranks.__code__.co_names
_OF_LOCAL_GROUPS = 1 << 30
_local_groups = 0


def number_of_groups() -> int:
    """What torch derives the name of the next `new_local_group` from, besides its ranks."""
    return _local_groups if _COUNTS_GROUPS else len(_world.pg_names)


def new_local_group(ranks: list[int], **options: Any) -> dist.ProcessGroup:
    """``dist.new_group(..., use_local_synchronization=True)``, collective among ``ranks`` alone.

    `number_of_groups` must be equal on them. The names of groups that all ranks create later don't depend on this.
    """
    global _local_groups
    counted = _world.group_count
    if _COUNTS_GROUPS:
        _world.group_count = _OF_LOCAL_GROUPS + _local_groups
    try:
        group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True, **options)
    finally:
        _local_groups += 1
        _world.group_count = counted
    return group


def groups_created() -> int:
    """Like `number_of_groups`, for groups that the program creates."""
    return _world.group_count if _COUNTS_GROUPS else len(_world.pg_names)


def skip_to_group(number: int) -> None:
    """Name the program's next group as on a rank whose `groups_created` is ``number``, if that is more."""
    if _COUNTS_GROUPS:
        _world.group_count = max(_world.group_count, number)
    else:
        for _ in range(groups_created(), number):
            new_local_group([dist.get_rank()], backend="gloo")


def _keep_groups() -> None:
    # Destroying a group joins its threads, which a forked child does not have. A list would be cleared at exit.
    for group in _world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_groups)


def replace_backend_plugins(wrap: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    dist.Backend._plugins = wrap(dist.Backend._plugins)


def graph_task() -> int | None:
    """The number of the backward that runs on this thread, if any."""
    number = _current_graph_task_id()
    return None if number == -1 else number


def accumulates(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the running backward adds to any of these parameters' ``.grad``; that of ``autograd.grad()`` doesn't."""
    nodes = (torch.autograd.graph.get_gradient_edge(p).node for p in parameters if p.requires_grad)  # lazy: it's slow
    try:
        return any(torch._C._will_engine_execute_node(node) for node in nodes)
    except RuntimeError:  # a parameter's gradient is what autograd.grad() returns
        return False


def at_end_of_backward(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def after_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> torch.utils.hooks.RemovableHandle:
    """A hook for when the tensor's gradient has been accumulated; returns its handle.

    A module's conversion swaps the contents of a DTensor. The table of hooks then stays on the Python object without
    effect, so that torch's method alone would register a hook that never runs.
    """
    handle: torch.utils.hooks.RemovableHandle = tensor.register_post_accumulate_grad_hook(hook)
    tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
    return handle


def has_multicast(index: int) -> bool:
    """Whether this GPU can sum over all GPUs of its NVLink switch at once. False where torch can't tell."""
    try:
        return bool(_SymmetricMemory.has_multicast_support(torch._C._autograd.DeviceType.CUDA, index))
    except RuntimeError:
        return False


def is_fake(module: torch.nn.Module) -> bool:
    """Whether the module's tensors, or those that are made now, have no memory."""
    in_fake_mode = _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None
    return in_fake_mode or any(isinstance(parameter, FakeTensor) for parameter in module.parameters())


def is_compiling() -> bool:
    """Whether torch.compile is tracing the running code, which bypasses dictionaries."""
    get_callback = getattr(eval_frame, "get_eval_frame_callback", None)
    return get_callback is not None and get_callback() not in (None, False)


def is_dynamo_tracing() -> bool:
    """Whether torch.compile is reading modules to compile the code that uses them."""
    return TracingContext.try_get() is not None


def dynamo_reduces() -> bool:
    """Whether compiled models reduce their gradients themselves."""
    return bool(torch._dynamo.config.optimize_ddp == "python_reducer")


def through_sink(ddp: torch.nn.Module, output: T, met: Callable[[bool], None] | None) -> T:
    """Route outputs through an autograd node of torch's DDP, which calls `met` with whether the loss uses all of them.

    Its backward runs first. It signals when the outermost backward of a static graph's first step begins, and passes
    undefined gradients to the hooks of parameters whose outputs the loss does not use.
    """
    tensors, spec, is_rref = _tree_flatten_with_rref(output)
    through = _DDPSink.apply(weakref.ref(ddp), *tensors)
    # Tensors that are not part of a graph stay as they are.
    kept = [t if torch.is_tensor(t) and t.grad_fn is None else s for t, s in zip(tensors, through, strict=True)]
    if met and (places := [i for i, t in enumerate(kept) if torch.is_tensor(t) and t.grad_fn is not None]):
        sink = torch.autograd.graph.get_gradient_edge(kept[places[0]]).node
        sink.register_prehook(lambda grads: met(all(grads[i] is not None for i in places)))
    result: T = _tree_unflatten_with_rref(kept, spec, is_rref)
    return result


def unflatten_state_dict(flat: dict[str, Any], paths: dict[str, Any]) -> dict[str, Any]:
    """The inverse of what torch's planners do to nested states."""
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict as unflatten  # takes a second to import

    return unflatten(flat, paths)


def after_workers_handlers(do: Callable[[], None]) -> None:
    """Call this once torch has installed the signal handlers of a DataLoader's worker, if this process becomes one."""
    if (module := sys.modules.get("torch.utils.data._utils.signal_handling")) is not None:
        install = module._set_worker_signal_handlers

        def then_do() -> None:
            install()
            do()

        vars(module).update(_set_worker_signal_handlers=then_do)
