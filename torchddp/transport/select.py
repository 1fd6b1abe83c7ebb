"""Which transport moves the buckets of a process group: chosen together by all its ranks."""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed.distributed_c10d import _world

from torchddp import _C
from torchddp.transport import nccl, shm
from torchddp.transport.agreement import GroupExchange

__all__ = [
    "CHOICES",
    "CHOICE_ENV",
    "LONGEST_TIMEOUT",
    "backend_of",
    "check_choice",
    "group_timeout",
    "intended_transport",
    "open_transport",
]

logger = logging.getLogger(__name__)

CHOICES = ("auto", "c10d", "shm", "nccl")
CHOICE_ENV = "TORCHDDP_TRANSPORT"
# Backends that a transport of ours may stand in for, by device: what they do is known, and nobody put something of
# their own between.
_KNOWN_BACKENDS = {"cpu": ("gloo", shm.BACKEND_NAME), "cuda": ("nccl",)}
# timedelta.max in microseconds, by which C++ is told, does not fit in 64 bits.
LONGEST_TIMEOUT = datetime.timedelta(days=100 * 365)


def check_choice(choice: str) -> str:
    """``choice``, or what TORCHDDP_TRANSPORT says where that is "auto". ValueError for anything not in ``CHOICES``."""
    if choice not in CHOICES:
        raise ValueError(f"transport must be {_quoted_choices()}, got {choice!r}")
    wished = os.environ.get(CHOICE_ENV, "")
    if choice != "auto" or not wished:
        return choice
    if wished not in CHOICES:
        raise ValueError(f"{CHOICE_ENV} must be {_quoted_choices()}, got {wished!r}")
    return wished


def _quoted_choices() -> str:
    return f"{', '.join(repr(c) for c in CHOICES[:-1])} or {CHOICES[-1]!r}"


def intended_transport(
    choice: str, process_group: dist.ProcessGroup, devices: Sequence[torch.device], *, collective: bool
) -> str:
    """What this rank will try: "c10d", "shm" or "nccl" (that or an error), or "auto": shared memory for parameters on
    the CPU, NCCL for those on CUDA, and c10d where that can't be had.

    Not collective; the answer must be the same on all ranks. ``collective``: whether the ranks may talk to each other
    now.
    """
    choice = check_choice(choice)
    device = devices[0] if devices else torch.device("cpu")
    if choice == "shm" and (elsewhere := next((d for d in devices if d.type != "cpu"), None)) is not None:
        raise ValueError(f"transport='shm' shares memory between CPU tensors, but there are parameters on {elsewhere}")
    if choice == "nccl" and (problem := _not_on_one_gpu(devices)):
        raise ValueError(f"transport='nccl' moves tensors of one CUDA device, but {problem}")
    if choice != "auto":
        return choice
    if len({d.type for d in devices}) > 1:
        reason = f"there are parameters on {' and '.join(map(str, dict.fromkeys(devices)))}"
    else:
        reason = _reason_for_c10d(process_group, device, collective)
    if not reason and device.type == "cuda":
        reason = _reason_against_nccl(devices)
    if reason:
        logger.debug("reducing through the process group: %s", reason)
    return "c10d" if reason else "auto"


def _not_on_one_gpu(devices: Sequence[torch.device]) -> str:
    places = list(dict.fromkeys(devices))
    if all(d.type == "cuda" for d in places) and len(places) == 1:
        return ""
    return f"there are parameters on {' and '.join(map(str, places)) or 'no device'}"


def _reason_against_nccl(devices: Sequence[torch.device]) -> str:
    if not _C.with_cuda:
        return "this torchddp was built without CUDA"
    return _not_on_one_gpu(devices)


def _reason_for_c10d(process_group: dist.ProcessGroup, device: torch.device, collective: bool) -> str:
    if device.type not in _KNOWN_BACKENDS:
        return f"there are parameters on {device}"
    if not collective:
        return "the ranks were told not to talk to each other here (init_sync=False, or a copy of a module)"
    if device.type == "cpu" and process_group.size() == 1:
        return "there is one rank"
    # A process group written in Python, or a wrapper around one, may do more than reduce.
    backend = backend_of(process_group, device.type)
    if type(process_group) is not dist.ProcessGroup or process_group not in _world.pg_map or backend is None:
        return "the process group is none of torch's own"
    if backend.name() not in _KNOWN_BACKENDS[device.type] or "Wrapper" in type(backend).__name__:
        return f"the process group's backend is {type(backend).__name__}"
    return ""


def open_transport(
    choice: str,
    process_group: dist.ProcessGroup,
    *,
    device: torch.device | None = None,
    timeout: datetime.timedelta | None = None,
) -> _C.Transport:
    """The transport of ``process_group`` for tensors of ``device`` (None: CPU tensors).

    Args:
        choice: "c10d" is the process group itself. "shm" is memory shared by the ranks of a host (several hosts: shared
            inside each, and the process group between them). "nccl" is a NCCL communicator and a stream of its own, for
            CUDA tensors; the process group may be any. "auto" tries shared memory, or NCCL for a CUDA device, and takes
            c10d where that can't be had.
        timeout: how long an operation may take; None: the process group's own limit.

    Collective unless the answer is c10d: every rank must give the same choice.

    Raises:
        ValueError: unknown choice, or one that does not fit the device.
        RuntimeError: "shm" or "nccl", and some rank can't. On all ranks, with rank and reason.
    """
    device = device or torch.device("cpu")
    choice = intended_transport(choice, process_group, (device,), collective=True)
    if choice == "c10d":
        return _C.C10dTransport(process_group)
    timeout = timeout or group_timeout(process_group, device.type)
    outcome: _C.Transport | str
    if device.type == "cuda":
        outcome = nccl.connect(process_group, device, timeout)
    else:
        outcome = shm.connect(GroupExchange(process_group), timeout, process_group, group_timeout(process_group))
    if isinstance(outcome, _C.Transport):
        return outcome
    if choice != "auto":
        raise RuntimeError(f"transport={choice!r} is impossible: {outcome}")
    if process_group.rank() == 0:
        what = "NCCL can't be used directly" if device.type == "cuda" else "memory can't be shared"
        logger.warning("torchddp reduces through the process group, for %s: %s", what, outcome)
    return _C.C10dTransport(process_group)


def backend_of(process_group: dist.ProcessGroup, device_type: str) -> Backend | None:
    """What the group has for tensors of such devices."""
    try:
        return process_group._get_backend(torch.device(device_type))
    except RuntimeError:
        return None


def group_timeout(process_group: dist.ProcessGroup, device_type: str = "cpu") -> datetime.timedelta:
    """How long the group's own operations may take."""
    options = getattr(backend_of(process_group, device_type), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, datetime.timedelta) else dist.default_pg_timeout
