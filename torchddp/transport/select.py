"""Chooses the transport that moves the buckets of a process group, together on all its ranks."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from torchddp import _C, _torch
from torchddp._extension import minor, running_versions
from torchddp._import_check import cuda_advice
from torchddp.transport import shm
from torchddp.transport.agreement import GroupExchange, backend_of, group_timeout
from torchddp.transport.store import is_first_in_job

logger = logging.getLogger(__name__)

C10D = "c10d"  # the process group itself, which needs no agreement
CHOICE_ENV = "TORCHDDP_TRANSPORT"
NEWEST_TORCH_ON_GPU = (2, 11)  # that docs/gpu.md has results of


@dataclasses.dataclass(frozen=True)
class TransportKind:
    """A transport that the ranks of a process group open together, or not at all.

    Attributes:
        name: as in the argument ``transport`` and in TORCHDDP_TRANSPORT.
        does: for the error about other tensors than ``device_type``'s: "transport='shm' <does>, but <misfit>".
        misfit: why it can't move tensors of these devices, the same on all ranks; or empty.
        connect: collective, with the first device and a time limit for operations: returns a transport on every rank,
            or the same reason for failure on every rank.
        stands_in_for: backends that "auto" replaces with it, because their behavior is known.
        reason_against: why "auto" should not use it, the same on all ranks; or empty.
    """

    name: str
    device_type: str
    does: str
    misfit: Callable[[Sequence[torch.device]], str]
    connect: Callable[[dist.ProcessGroup, torch.device, datetime.timedelta], _C.Transport | str]
    stands_in_for: tuple[str, ...] = ()
    reason_against: Callable[[dist.ProcessGroup], str] = lambda process_group: ""


_kinds: dict[str, TransportKind] = {}


def register(kind: TransportKind) -> None:
    """Make it available by name, and to "auto" for the backends it stands in for."""
    _kinds[kind.name] = kind


register(
    TransportKind(
        "shm",
        "cpu",
        "shares memory between CPU tensors",
        lambda devices: next((f"there are parameters on {d}" for d in devices if d.type != "cpu"), ""),
        lambda group, _device, timeout: shm.connect(GroupExchange(group), timeout, group, group_timeout(group)),
        stands_in_for=("gloo", shm.BACKEND_NAME),
        reason_against=lambda group: "there is one rank" if group.size() == 1 else "",
    )
)
register(
    TransportKind(
        "nccl",
        "cuda",
        "moves tensors of one CUDA device",
        lambda devices: _not_on_one_gpu(devices),
        lambda group, device, timeout: _connect_nccl(group, device, timeout),
        stands_in_for=("nccl", "nccl2"),  # from torch 2.15 on, the backend "nccl" calls itself nccl2
        reason_against=lambda group: "" if _C.with_cuda else _no_cuda(group),
    )
)


def check_choice(choice: str) -> str:
    """Return ``choice``, or TORCHDDP_TRANSPORT in place of "auto". ValueError if it is not registered."""
    *names, last = map(repr, ("auto", C10D, *_kinds))
    wished = (os.environ.get(CHOICE_ENV) or "auto") if choice == "auto" else choice
    for source, value in (("transport", choice), (CHOICE_ENV, wished)):
        if value not in ("auto", C10D, *_kinds):
            hint = f". {C10D!r} uses the process group, whatever its backend" if value in ("gloo", "mpi") else ""
            raise ValueError(f"{source} must be {', '.join(names)} or {last}, got {value!r}{hint}")
    return wished


def intended_transport(
    choice: str, process_group: dist.ProcessGroup, devices: Sequence[torch.device], *, collective: bool
) -> str:
    """What this rank will try: "c10d", a registered transport (that or an error), or "auto" (whatever stands in for
    the group's backend, or else c10d). The same on all ranks.

    Not collective. ``collective``: whether the ranks may communicate now.
    """
    choice = check_choice(choice)
    if choice in _kinds and (problem := _misfit(_kinds[choice], process_group, devices)):
        raise ValueError(f"transport={choice!r} {_kinds[choice].does}, but {problem}")
    if choice != "auto":
        return choice
    devices = devices or (torch.device("cpu"),)
    reason = _reason_for_c10d(process_group, devices, collective)
    if reason:
        logger.debug("reducing through the process group: %s", reason)
    untested = devices[0].type == "cuda" and minor(torch.__version__) > NEWEST_TORCH_ON_GPU
    if untested and logger.isEnabledFor(logging.INFO):
        _tell_choice(process_group, reason)
    return C10D if reason else "auto"


def _tell_choice(process_group: dist.ProcessGroup, reason: str) -> None:
    chosen = f"reduces through the process group: {reason}" if reason else "chooses its own NCCL communicator"
    if is_first_in_job(f"on an untested torch: {chosen}", process_group):
        tested = ".".join(map(str, NEWEST_TORCH_ON_GPU))
        logger.info(
            "torch %s is newer than %s, the newest tested on GPUs: torchddp %s", torch.__version__, tested, chosen
        )


def _stand_in_for(device: torch.device) -> TransportKind | None:
    return next((kind for kind in _kinds.values() if kind.stands_in_for and kind.device_type == device.type), None)


def _reason_for_c10d(process_group: dist.ProcessGroup, devices: Sequence[torch.device], collective: bool) -> str:
    if len({d.type for d in devices}) > 1:
        return f"there are parameters on {' and '.join(map(str, dict.fromkeys(devices)))}"
    kind = _stand_in_for(devices[0])
    if kind is None:
        return f"there are parameters on {devices[0]}"
    if not collective:
        return "the ranks may not communicate here (init_sync=False, or a copy of a module)"
    if reason := kind.reason_against(process_group):
        return reason
    # A process group written in Python, or a wrapper around one, may do more than reduce.
    backend = backend_of(process_group, kind.device_type)
    if type(process_group) is not dist.ProcessGroup or not _torch.is_alive(process_group) or backend is None:
        return "the process group is not one of torch's own"
    if backend.name() not in kind.stands_in_for or "Wrapper" in type(backend).__name__:
        return f"the process group's backend is {type(backend).__name__}"
    return _misfit(kind, process_group, devices)


def _misfit(kind: TransportKind, process_group: dist.ProcessGroup, devices: Sequence[torch.device]) -> str:
    options = getattr(backend_of(process_group, kind.device_type), "options", None)
    if getattr(options, "enable_reconfigure", False):  # from torch 2.14 on; we would go on with the former ranks
        return "ranks of the process group may change (enable_reconfigure=True)"
    return kind.misfit(devices)


def _connect_nccl(
    process_group: dist.ProcessGroup, device: torch.device, timeout: datetime.timedelta
) -> _C.Transport | str:
    from torchddp.transport import nccl  # only programs with a GPU need it

    return nccl.connect(process_group, device, timeout)


def _not_on_one_gpu(devices: Sequence[torch.device]) -> str:
    places = list(dict.fromkeys(devices))
    if len(places) == 1 and places[0].type == "cuda":
        return ""
    return f"there are parameters on {' and '.join(map(str, places)) or 'no device'}"


def _no_cuda(process_group: dist.ProcessGroup) -> str:
    """GPU models also train with a CPU build, but slowly, and pip can't tell the builds apart."""
    if is_first_in_job("built without CUDA", process_group):
        advice = cuda_advice(running_versions()["cuda"])
        logger.warning("the model is on a GPU, but this torchddp was built without CUDA, which is slow. %s", advice)
    return "this torchddp was built without CUDA"


def open_transport(
    choice: str,
    process_group: dist.ProcessGroup,
    *,
    device: torch.device | None = None,
    timeout: datetime.timedelta | None = None,
) -> _C.Transport:
    """Open the transport of ``process_group`` for tensors of ``device`` (None: CPU tensors).

    "c10d" is the process group itself; "shm" memory shared by the ranks of a host (with several hosts, the process
    group between them); "nccl" our own communicator and stream, for CUDA tensors; "auto" tries shared memory, or NCCL
    for a CUDA device, and falls back to c10d. ``timeout``: of an operation; None: the process group's own.

    Collective unless the answer is c10d; every rank must pass the same choice.

    Raises:
        ValueError: the choice is unknown or doesn't fit the device.
        RuntimeError: on all ranks, with the reason: some rank can't use a transport other than "auto" and "c10d".
    """
    device = device or torch.device("cpu")
    choice = intended_transport(choice, process_group, (device,), collective=True)
    kind = _stand_in_for(device) if choice == "auto" else _kinds.get(choice)
    if kind is None:
        return _C.C10dTransport(process_group)
    outcome = kind.connect(process_group, device, timeout or group_timeout(process_group, device.type))
    if isinstance(outcome, _C.Transport):
        return outcome
    if choice != "auto":
        raise RuntimeError(f"transport={choice!r} can't be used: {outcome}")
    if is_first_in_job(f"{kind.name} can't be used: {outcome}", process_group):
        logger.warning("torchddp reduces through the process group: transport %r can't be used: %s", kind.name, outcome)
    return _C.C10dTransport(process_group)
