"""Tries the transports: processes of this machine that reduce a tensor with each other.

`python -m torchddp.cli.probe NAME RANK RANKS STORE` is one of those processes.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

GROUP_TIMEOUT = datetime.timedelta(seconds=20)
PROCESS_TIMEOUT_S = 60.0
NUMEL = 4099  # no multiple of any vector's length


@dataclass(frozen=True)
class Probe:
    """How a transport is tried. Shared memory is without gloo: that may be what fails."""

    backend: str
    device: str
    ranks: int


PROBES = {
    "c10d": Probe(backend="gloo", device="cpu", ranks=2),
    "shm": Probe(backend="torchddp_shm", device="cpu", ranks=2),
    "nccl": Probe(backend="nccl", device="cuda:0", ranks=1),
}


def failures(names: list[str], timeout_s: float = PROCESS_TIMEOUT_S) -> dict[str, str]:
    """By name: why it does not work, or "". They run at the same time."""
    with tempfile.TemporaryDirectory(prefix="torchddp-doctor-") as folder:
        running = {name: _start(name, Path(folder)) for name in names}
        deadline_s = time.monotonic() + timeout_s
        return {name: _collect(processes, deadline_s, timeout_s) for name, processes in running.items()}


def _start(name: str, folder: Path) -> list[subprocess.Popen[str]]:
    ranks = PROBES[name].ranks
    command = [sys.executable, "-m", __name__, name]
    return [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(folder / name)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def _collect(processes: list[subprocess.Popen[str]], deadline_s: float, timeout_s: float) -> str:
    """The first rank's reason that has one."""
    reasons = []
    for rank, process in enumerate(processes):
        try:
            output, errors = process.communicate(timeout=max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            reasons.append(f"process {rank} gave no answer within {timeout_s:g} s")
            continue
        reasons.append(read_answer(output, errors, rank, process.returncode))
    return next(filter(None, reasons), "")


def read_answer(output: str, errors: str, rank: int, exit_code: int) -> str:
    """What a process said, or how it ended if it did not come to that."""
    lines = output.strip().splitlines()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(lines[-1] if lines else "")["failure"])
    last = (errors.strip().splitlines() or ["it said nothing"])[-1]
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
    except Exception as error:  # whatever it is, it is the answer
        failure = " ".join(str(error).split()) or type(error).__name__
    print(json.dumps({"failure": failure}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
