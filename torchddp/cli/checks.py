"""The checks of `torchddp doctor`: the transports, and the environment's TORCHDDP_* variables."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from torchddp.harness.launch import LaunchError, RankJob, Report, launch

PROCESS_TIMEOUT_S = 60.0
NUMEL = 4099  # not a multiple of any vector length
# name: backend, device and number of ranks. Shared memory is tried without gloo, which may itself fail.
PROBES = {"c10d": ("gloo", "cpu", 2), "shm": ("torchddp_shm", "cpu", 2), "nccl": ("nccl", "cuda:0", 1)}
GROUP_TIMEOUT_S = 20.0


def failure(name: str, timeout_s: float = PROCESS_TIMEOUT_S) -> str:
    """Try a transport with processes on this machine that reduce a tensor. Why it does not work, or ""."""
    backend, device, ranks = PROBES[name]
    job = RankJob(name, _reduce, (name, device, ranks), ranks, backend, collective_timeout_s=GROUP_TIMEOUT_S)
    try:
        launch(job, lambda *_: None, stall_timeout_s=timeout_s)
    except LaunchError as error:
        return str(error)
    return ""


def _reduce(report: Report, name: str, device: str, ranks: int) -> None:
    import torch
    import torch.distributed as dist

    from torchddp.transport import select

    tensor = torch.arange(NUMEL, dtype=torch.float32, device=device) + dist.get_rank()
    expected = ranks * torch.arange(NUMEL, dtype=torch.float32) + sum(range(ranks))
    if name == "shm":
        dist.all_reduce(tensor)
    else:
        group = dist.group.WORLD
        assert group is not None
        transport = select.open_transport(name, group, device=tensor.device)
        tensor = transport.allocate(NUMEL, like=tensor).copy_(tensor)
        work = transport.make_work()
        transport.all_reduce(tensor, work)
        work.wait(datetime.timedelta(seconds=GROUP_TIMEOUT_S))
    if not torch.equal(tensor.cpu(), expected):
        raise RuntimeError("the sum was wrong; please report it")


PREFIX = "TORCHDDP_"
CPU_CAPABILITIES = ("generic", "avx2", "avx512")


@dataclass(frozen=True)
class Variable:
    """A variable that is set. `problem`: why its value is invalid; `note`: something odd that is not an error."""

    name: str
    value: str
    problem: str = ""
    note: str = ""


def set_variables() -> list[Variable]:
    return [_judge(name, os.environ[name]) for name in sorted(os.environ) if name.startswith(PREFIX)]


def _judge(name: str, value: str) -> Variable:
    if name not in KNOWN:
        return Variable(name, value, note="this version does not read it")
    try:
        if value and (check := _CHECKS.get(name)) is not None:
            check(value)
    except ValueError as error:
        return Variable(name, value, problem=str(error))
    except ImportError:
        return Variable(name, value, note="can't be checked: torchddp does not load")
    return Variable(name, value)


def _check_capability(value: str) -> None:
    if value not in CPU_CAPABILITIES:
        raise ValueError(f"TORCHDDP_CPU_CAPABILITY must be 'generic', 'avx2' or 'avx512', got {value!r}")


def _check_build(value: str) -> None:
    if value not in ("0", "1"):
        raise ValueError(f"TORCHDDP_BUILD must be 0 or 1, got {value!r}")


# The package's modules are imported only if the variable is set; most checks read the variable themselves.
_CHECKS: dict[str, Callable[[str], object] | None] = {
    "TORCHDDP_BUILD": _check_build,
    "TORCHDDP_CACHE_DIR": None,  # any path
    "TORCHDDP_CHECKS": lambda _: import_module("torchddp.ddp.checks").chosen(None),
    "TORCHDDP_CPU_CAPABILITY": _check_capability,
    "TORCHDDP_FLIGHT_RECORDER_DIR": None,  # any path
    "TORCHDDP_HANG_REPORT_DIR": None,  # any path
    "TORCHDDP_HOST_ID": None,  # any text
    "TORCHDDP_INSTALL": lambda value: import_module("torchddp.integrations.install").check_variable(value),
    "TORCHDDP_SHM_LIMIT_MB": lambda _: import_module("torchddp.transport.shm").limit_bytes(),
    "TORCHDDP_STALL_REPORT_S": lambda _: import_module("torchddp.ddp.checks").Checks().stall_limit_s(math.inf),
    "TORCHDDP_TRANSPORT": lambda _: import_module("torchddp.transport.select").check_choice("auto"),
}
READ_BY_THE_BUILD = frozenset({"TORCHDDP_BUILD_DIR", "TORCHDDP_CUDA", "TORCHDDP_UNITY", "TORCHDDP_WERROR"})
READ_BY_TESTS_AND_BENCHMARKS = frozenset(
    {"TORCHDDP_COMMIT", "TORCHDDP_TEST_CLASS", "TORCHDDP_TEST_DEVICE", "TORCHDDP_TEST_NCCL"}
)
READ_WHILE_TRAINING = frozenset(_CHECKS)
KNOWN = READ_WHILE_TRAINING | READ_BY_THE_BUILD | READ_BY_TESTS_AND_BENCHMARKS
