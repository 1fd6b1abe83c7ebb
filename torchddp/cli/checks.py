"""The checks of `torchddp doctor`: the transports, and the environment's TORCHDDP_* variables.

A transport is tried by processes on this machine that reduce a tensor. Each of them runs
`python -m torchddp.cli.checks NAME RANK RANKS STORE`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

GROUP_TIMEOUT = datetime.timedelta(seconds=20)
PROCESS_TIMEOUT_S = 60.0
NUMEL = 4099  # not a multiple of any vector length


@dataclass(frozen=True)
class Probe:
    """How to try a transport. Shared memory is tried without gloo, which may itself fail."""

    backend: str
    device: str
    ranks: int


PROBES = {
    "c10d": Probe(backend="gloo", device="cpu", ranks=2),
    "shm": Probe(backend="torchddp_shm", device="cpu", ranks=2),
    "nccl": Probe(backend="nccl", device="cuda:0", ranks=1),
}


def failures(names: list[str], timeout_s: float = PROCESS_TIMEOUT_S) -> dict[str, str]:
    """Try the transports, all at the same time; by name, why each does not work, or ""."""
    running: dict[str, list[subprocess.Popen[str]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="torchddp-doctor-") as folder:
        try:
            with _interrupted_afterwards():  # so that each started process is recorded, and ended below
                for name, processes in running.items():
                    _start(name, Path(folder), processes)
            deadline_s = time.monotonic() + timeout_s
            return {name: _collect(processes, deadline_s, timeout_s) for name, processes in running.items()}
        finally:  # also on Ctrl-C
            for process in (process for processes in running.values() for process in processes):
                process.kill()
                process.wait()


@contextlib.contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _start(name: str, folder: Path, processes: list[subprocess.Popen[str]]) -> None:
    """Add the probe's processes to `processes`."""
    ranks = PROBES[name].ranks
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # TORCHDDP_TOPOLOGY describes other ranks than these.
    pipes["env"] = {name: value for name, value in os.environ.items() if name != "TORCHDDP_TOPOLOGY"}
    command = [sys.executable, "-m", __name__, name]
    for rank in range(ranks):
        arguments = [str(rank), str(ranks), str(folder / name)]
        # In its own session it does not receive Ctrl-C.
        processes.append(subprocess.Popen([*command, *arguments], text=True, start_new_session=True, **pipes))


def _collect(processes: list[subprocess.Popen[str]], deadline_s: float, timeout_s: float) -> str:
    """The first reason that a rank gave, or ""."""
    reasons = []
    for rank, process in enumerate(processes):
        try:
            output, errors = process.communicate(timeout=max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            reasons.append(f"process {rank} did not answer within {timeout_s:g} s")
            continue
        reasons.append(read_answer(output, errors, rank, process.returncode))
    return next(filter(None, reasons), "")


def read_answer(output: str, errors: str, rank: int, exit_code: int) -> str:
    """The reason that a process reported, or else how it ended."""
    lines = output.strip().splitlines()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(lines[-1] if lines else "")["failure"])
    last = (errors.strip().splitlines() or ["it printed nothing"])[-1]
    return f"process {rank} ended with exit code {exit_code}: {last}"


def _reduce(name: str, rank: int, ranks: int, store_path: str) -> None:
    import torch
    import torch.distributed as dist

    from torchddp.transport import select  # with the package, which registers the backend "torchddp_shm"

    probe = PROBES[name]
    store = dist.FileStore(store_path, ranks)
    dist.init_process_group(probe.backend, store=store, rank=rank, world_size=ranks, timeout=GROUP_TIMEOUT)
    try:
        tensor = torch.arange(NUMEL, dtype=torch.float32, device=probe.device) + rank
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
            work.wait(GROUP_TIMEOUT)
        if not torch.equal(tensor.cpu(), expected):
            raise RuntimeError("the sum was wrong; please report it")
    finally:
        dist.destroy_process_group()


def _main(name: str, rank: str, ranks: str, store_path: str) -> None:
    failure = ""
    try:
        _reduce(name, int(rank), int(ranks), store_path)
    except Exception as error:  # any error is an answer
        failure = " ".join(str(error).split()) or type(error).__name__
    print(json.dumps({"failure": failure}))


# --- variables ---

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
    """The variables in this process's environment, by name."""
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


# The package's modules are imported only if the variable is set; most checks read the variable themselves.
_CHECKS: dict[str, Callable[[str], object] | None] = {
    "TORCHDDP_CACHE_DIR": None,  # any path
    "TORCHDDP_CPU_CAPABILITY": _check_capability,
    "TORCHDDP_HANG_REPORT_DIR": None,  # any path
    "TORCHDDP_HOST_ID": None,  # any text
    "TORCHDDP_INSTALL": lambda value: import_module("torchddp.integrations.install").check_variable(value),
    "TORCHDDP_SHM_LIMIT_MB": lambda _: import_module("torchddp.transport.shm").limit_bytes(),
    "TORCHDDP_STALL_REPORT_S": lambda _: import_module("torchddp.ddp.options").stall_limit_s(None, math.inf),
    "TORCHDDP_TOPOLOGY": lambda _: import_module("torchddp.transport.shm").topology(),
    "TORCHDDP_TRANSPORT": lambda _: import_module("torchddp.transport.select").check_choice("auto"),
}
READ_BY_THE_BUILD = frozenset({"TORCHDDP_CUDA", "TORCHDDP_UNITY", "TORCHDDP_WERROR"})
READ_BY_TESTS_AND_BENCHMARKS = frozenset(
    {"TORCHDDP_COMMIT", "TORCHDDP_COUNTS_FILE", "TORCHDDP_TEST_CLASS", "TORCHDDP_TEST_DEVICE", "TORCHDDP_TEST_NCCL"}
)
READ_WHILE_TRAINING = frozenset(_CHECKS)
KNOWN = READ_WHILE_TRAINING | READ_BY_THE_BUILD | READ_BY_TESTS_AND_BENCHMARKS


if __name__ == "__main__":
    _main(*sys.argv[1:])
