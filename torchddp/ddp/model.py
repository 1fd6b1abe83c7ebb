"""Facts about the wrapped model: parameters, buffers, and changes after wrapping."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp import _C, _torch
from torchddp.errors import listed, warn_user
from torchddp.transport.store import home_of, is_first_in_job

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    if type(tensor) in _PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # a program that has a DTensor has imported it
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or the local part of a DTensor: same memory, no graph. Not collective."""
    if not is_dtensor(tensor):
        return tensor
    local: torch.Tensor = tensor._local_tensor  # to_local() would make a Parameter of it
    if hasattr(local, "trigger_wait"):  # a collective may still be writing it
        local = local.wait()  # type: ignore[attr-defined]
    return local


def group_of(process_group: object, device_mesh: dist.DeviceMesh | None) -> dist.ProcessGroup | None:
    """The group that a wrapper with these arguments uses; None if there is none that this rank is in."""
    if device_mesh is not None and process_group is None and getattr(device_mesh, "ndim", 0) == 1:
        process_group = device_mesh.get_group(mesh_dim=0)
    if process_group is None and dist.is_initialized():
        process_group = dist.group.WORLD
    return process_group if isinstance(process_group, dist.ProcessGroup) else None


def device_of(module: object) -> torch.device | None:
    return next((p.device for p in module.parameters()), None) if isinstance(module, torch.nn.Module) else None


def check_group(process_group: object, device_mesh: object) -> None:
    if process_group is None and device_mesh is None and not dist.is_initialized():
        raise ValueError(
            "Default process group has not been initialized, please make sure to call init_process_group. Before the "
            "model is wrapped, add:\n\n"
            "    import torch.distributed as dist\n"
            '    dist.init_process_group("gloo")  # with models on GPUs: "nccl"\n\n'
            "and start the program with: torchrun --nproc-per-node 2 train.py"
        )


def check_is_group(group: object) -> None:
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            "process_group must be a process group that this rank is in; new_group() has left it out. "
            "Wrap the model only on ranks of the group, or pass a group that includes this rank"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"process_group must be a process group or None, got {type(group).__name__} {group!r:.80}")


def warn_if_alone(group: dist.ProcessGroup) -> None:
    ranks = home_of(group).size()
    if group.size() == 1 < ranks and is_first_in_job("a group of one rank", group):
        logger.warning(
            "rank %d: this model's process group contains only this rank, although the job has %d ranks, so its "
            "gradients are not averaged. If ranks should train this model together, pass their group as process_group=",
            dist.get_rank(),
            ranks,
        )


def check_devices(module: torch.nn.Module, device_ids: object, output_device: object) -> None:
    """ValueError, as from torch's class, if a model on the CPU is wrapped as one on a GPU."""
    given = [f"{name}={it!r}" for name, it in (("device_ids", device_ids), ("output_device", output_device)) if it]
    if given and {p.device.type for p in module.parameters()} == {"cpu"}:
        raise ValueError(
            f"{' and '.join(given)} {'are' if len(given) > 1 else 'is'} for a model on a GPU, but this one is on "
            "the CPU: move it with module.to(device) before it is wrapped, or leave device_ids and output_device out"
        )


def check_module(module: object, who: str = "DistributedDataParallel") -> None:
    """As from torch's class: TypeError for a class, AttributeError for no module, RuntimeError for fake tensors."""
    if isinstance(module, type):
        name = module.__name__
        raise TypeError(f"{who} wraps a module, but got the class {name} itself: pass an instance, {who}({name}(...))")
    if not isinstance(module, torch.nn.Module):
        raise AttributeError(f"{who} wraps a torch.nn.Module, got {type(module).__name__}")
    if _torch.is_fake(module):
        raise RuntimeError(
            "DistributedDataParallel can't reduce fake tensors, which have no memory. Make and wrap the model outside "
            'of FakeTensorMode; without other ranks, use init_process_group("fake")'
        )


def check_values(module: torch.nn.Module) -> None:
    """RuntimeError, as from torch's class, for a model on the meta device, which can't be sent."""
    if {p.device.type for p in module.parameters()} == {"meta"}:
        raise RuntimeError(
            "the model is on the meta device, where parameters have no values: give it memory with "
            "module.to_empty(device=...), and initialize it, before it is wrapped"
        )


def check_memory(module: torch.nn.Module) -> None:
    """RuntimeError for a trained parameter that wraps other tensors, whose memory its class hides."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    for name, p in module.named_parameters():
        is_plain = type(p) in _PLAIN or is_dtensor(p)
        if p.requires_grad and name not in ignored and not is_plain and hasattr(p, "__tensor_flatten__"):
            raise RuntimeError(
                f"parameter {name!r} is a {type(p).__name__}, which has no memory of its own but wraps other tensors: "
                "its gradients can't be reduced. Freeze it or leave it out of the model"
            )


def check_local(parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """ValueError for a DTensor that neither ``device_mesh`` nor `torchddp.replicate` has replaced by its local part."""
    if found := [name for name, p in zip(names, parameters, strict=True) if is_dtensor(p)]:
        raise ValueError(
            f"parameter {found[0]!r} is a DTensor. Name the dimension of its mesh to average over: "
            "DistributedDataParallel(module, device_mesh=mesh['dp']) or torchddp.replicate(module, mesh=mesh['dp'])"
        )


def lists_members_itself(module: torch.nn.Module) -> bool:
    """Whether its class overrides how nn.Module lists parameters and buffers, perhaps to leave some out."""
    own, torchs = type(module), torch.nn.Module
    return (
        own.named_buffers is not torchs.named_buffers
        or own.named_parameters is not torchs.named_parameters
        or own.named_modules is not torchs.named_modules
        or own._named_members is not torchs._named_members
    )


def buffers_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """The tensors of ``module.named_buffers()``. Faster than that, because every forward calls this."""
    if lists_members_itself(module):
        return [local_of(buffer) for _, buffer in module.named_buffers()]
    found = _C.module_buffers(module)
    return found if _C.can_travel_as_bytes(found) else [local_of(buffer) for buffer in found]


def states_of(module: torch.nn.Module, ignored: Collection[str], *, buffers: bool) -> dict[str, torch.Tensor]:
    named = [*module.named_parameters(), *(module.named_buffers() if buffers else ())]
    return {name: local_of(tensor).detach() for name, tensor in named if name not in ignored}


def check_can_be_received(module: torch.nn.Module, states: Iterable[torch.Tensor]) -> None:
    """RuntimeError, as from torch's class, if elements share memory. On all ranks: the sender alone could go on."""
    for tensor in states:
        if any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
            named = [*module.named_parameters(), *module.named_buffers()]
            name = next((name for name, other in named if local_of(other).data_ptr() == tensor.data_ptr()), "")
            raise RuntimeError(
                f"parameter or buffer {name!r} of shape {tuple(tensor.shape)} is expanded: its elements share memory, "
                "so no values can be received into it. clone() it before the model is wrapped"
            )


def backward_hook_tables(module: torch.nn.Module | TorchDDP) -> list[Sized]:
    """The tables of backward hooks of a module and its parts, and those of all modules; they fill as hooks register."""
    names = ("_backward_hooks", "_backward_pre_hooks")
    tables = [part.__dict__.get(name, {}) for part in module.modules() for name in names]
    return [*tables, *(getattr(torch.nn.modules.module, f"_global{name}") for name in names)]


def trains_as_before(module: torch.nn.Module, known: list[torch.Tensor], trained: bytes) -> bool:
    """Whether ``known`` are all of the module's parameters, and exactly those with a byte of 1 require grad."""
    if not lists_members_itself(module):
        return bool(_C.trains_as_before(module, known, trained))
    now = list(module.parameters())
    return [*map(id, now)] == [*map(id, known)] and bytes(p.requires_grad for p in now) == trained


REFRESH = "call its refresh_trainable() on all ranks after such a change"


def describe_changes(ddp: TorchDDP, reduced_ids: Collection[int]) -> str:
    """How the model was changed after it was wrapped, or "". ``reduced_ids``: of the parameters that are reduced."""
    known = {id(p) for p in ddp._module_parameters}
    current = {n: p for n, p in ddp.module.named_parameters() if n not in ddp.parameters_to_ignore}
    added = [n for n, p in current.items() if id(p) not in known]
    removed = len(known - {id(p) for p in current.values()})
    frozen = [n for n, p in current.items() if not p.requires_grad and id(p) in reduced_ids]
    parts = []
    if added or removed:
        parts.append(f"{removed} parameters were removed or replaced; these are new: {listed(added, 8) or 'none'}")
    if frozen:
        parts.append(f"these no longer require grad: {', '.join(frozen[:8])}")
    changed = "; ".join(parts)
    otherwise = "wrap it with auto_refresh_trainable=True"
    return f"The model was changed after it was wrapped ({changed}): {REFRESH}, or {otherwise}." if parts else ""


def reason_against_reducing(ddp: TorchDDP) -> str:
    """Why the model's options exclude reducing gradients without a backward; empty if they don't."""
    if ddp.mixed_precision is not None:
        return "with mixed_precision, gradients are reduced and cast back inside backward"
    if ddp._delay_all_reduce_params:
        return "parameters of delay_all_reduce_named_params are reduced by a hook in backward"
    if ddp._use_python_reducer:
        return "torch._dynamo.config.optimize_ddp='python_reducer' reduces each gradient separately in backward"
    return ""


def names_in_order(names: Mapping[int, str]) -> list[str]:
    """torch's names of the parameters, by index, without the dot that it puts before those of the outermost module."""
    return [names[i].removeprefix(".") for i in range(len(names))]


# Alignment of gradients in a bucket on a GPU: a cache line, so that kernels and views move whole lines.
SLOT_ALIGNMENT_BYTES = 128


def param_specs(
    parameters: Sequence[torch.Tensor],
    names: Sequence[str],
    sparse: Sequence[bool],
    bucket_dtypes: Sequence[torch.dtype] | None = None,
    owners: Sequence[int] | None = None,
) -> list[_C.ParamSpec]:
    """Describe the parameters for the reducer and the planner; ``bucket_dtypes`` defaults to their own dtypes."""
    bucket_dtypes = bucket_dtypes or [p.dtype for p in parameters]
    owners = owners if owners is not None else [-1] * len(parameters)
    dtypes = {dtype: i for i, dtype in enumerate(dict.fromkeys(p.dtype for p in parameters))}
    devices = {device: i for i, device in enumerate(dict.fromkeys(p.device for p in parameters))}
    return [
        _C.ParamSpec(
            name=name,
            numel=p.numel(),
            itemsize=in_bucket.itemsize,
            dtype=dtypes[p.dtype],
            device=devices[p.device],
            sparse=is_sparse,
            owner=owner,
            alignment=SLOT_ALIGNMENT_BYTES if p.is_cuda else 1,
        )
        for p, name, is_sparse, in_bucket, owner in zip(parameters, names, sparse, bucket_dtypes, owners, strict=True)
    ]


FIRST_LOOK, LOOK_EVERY = 16, 64  # steps
_STATELESS = torch.nn.utils.stateless.__file__


class ParameterWatch:
    """Warn once about parameters whose gradients don't reach the reducer, so that each rank trains them on its own.

    Two things detach a parameter from the reducer without an error: replacing it (``load_state_dict`` with
    ``assign=True``), and converting its dtype or device, which gives it a new autograd node while the reducer's hook
    stays on the old one. Parameters thawed or added after wrapping were never attached.

    A check takes a few microseconds per hundred parameters. It runs in steps 1 and `FIRST_LOOK`, in every
    `LOOK_EVERY`th, and after the first, second, fourth, eighth, ... step that ended without any gradient.
    """

    def __init__(
        self, module: torch.nn.Module, parameters: Sequence[torch.Tensor], names: Iterable[str], *, warns: bool
    ) -> None:
        there = {id(parameter) for parameter in module.parameters()}
        self._hooked = [
            (name, parameter, parameter.dtype, _node(parameter), id(parameter) in there)
            for name, parameter in zip(names, parameters, strict=True)
        ]
        self.in_doubt = warns
        self._steps = 0
        self._steps_without_gradients = 0
        self._has_told = not warns

    def begin_step(self, *, without_gradients: bool) -> None:
        """``without_gradients``: the last synchronized forward got no gradient, often because it had no backward."""
        self._steps += 1
        self.in_doubt |= self._steps % LOOK_EVERY == 0 or self._steps == FIRST_LOOK
        if without_gradients:
            self._steps_without_gradients += 1
            self.in_doubt |= self._steps_without_gradients & (self._steps_without_gradients - 1) == 0

    @_torch.disable_dynamo(recursive=True)
    def look(self, ddp: TorchDDP, reduced_ids: Collection[int]) -> None:
        """Check before forward. Not collective. ``reduced_ids``: ids of the parameters in the reducer."""
        if _torch.in_functorch() or torch.jit.is_tracing():
            return  # parameters have no autograd nodes there, or a trace would record this: check in the next step
        self.in_doubt = False
        if self._has_told:
            return
        named = dict(ddp.module.named_parameters())
        there = {id(parameter) for parameter in named.values()}
        replaced = [name for name, p, _, _, was_there in self._hooked if was_there and id(p) not in there]
        converted = [
            f"{name} ({dtype} to {parameter.dtype})" if parameter.dtype != dtype else name
            for name, parameter, dtype, node, _ in self._hooked
            if parameter.requires_grad and _node(parameter) is not node
        ]
        added = [
            name
            for name, parameter in named.items()
            if parameter.requires_grad
            and id(parameter) not in reduced_ids
            and name not in ddp.parameters_to_ignore
            and name not in replaced
        ]
        if not (replaced or converted or added) or ((replaced or added) and in_functional_call()):
            return
        self._has_told, self._hooked = True, []
        kinds = (
            (converted, "converted to another dtype or device"),
            (replaced, "replaced by other parameters (load_state_dict with assign=True, or an assignment)"),
            (added, "thawed or added"),
        )
        found = [f"{they_were(names)} {what}" for names, what in kinds if names]
        rank = ddp.process_group.rank()
        # It looks at the parameters' identities, which a conversion keeps.
        if converted:
            advice = f"{REFRESH}; better, convert or move the model before it is wrapped"
        else:
            advice = f"{REFRESH} (auto_refresh_trainable=True does this)"
        if replaced:
            advice += "; load_state_dict() without assign=True keeps the parameters"
        warn_user(
            f"The model of this DistributedDataParallel (rank {rank}) was changed after it was wrapped: "
            f"{'; '.join(found)}. Their gradients are not averaged: each rank trains them on its own. To average "
            f"them, {advice}."
        )


def _node(parameter: torch.Tensor) -> object:
    """The node in which autograd accumulates the gradient; the same object for as long as it is referenced."""
    if not parameter.requires_grad or parameter.is_inference():
        return None
    # With subclasses, torch would find a node of its own conversion; in inference mode, none.
    with torch.inference_mode(False), _torch.without_subclasses():
        return torch.autograd.graph.get_gradient_edge(parameter).node


def in_functional_call() -> bool:
    """Whether other tensors replace the parameters during this call."""
    return any(frame.f_code.co_filename == _STATELESS for frame, _ in traceback.walk_stack(sys._getframe()))


def they_were(names: Sequence[str]) -> str:
    return f"{listed(names)} {'was' if len(names) == 1 else 'were'}"
