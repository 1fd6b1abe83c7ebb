"""Starts ranks as separate programs, as launchers do."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLAIM = "replaces torch.nn.parallel.DistributedDataParallel in this process"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1")
LAUNCHERS = ("SLURM", "SRUN", "TORCHELASTIC", "TORCHDDP_", "PYTHON")
TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
# Doesn't import torchddp. One write per line: print() writes in parts, so lines of two ranks would mix.
UNMODIFIED = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as D
dist.init_process_group("gloo")
model, rank = D(torch.nn.Linear(2, 2)), dist.get_rank()
model(torch.full((1, 2), float(rank))).sum().backward()
mean, made = float(model.module.weight.grad[0, 0]), f"{type(model).__module__} {model.reducer.transport.name}"
sys.stdout.write(f"rank {rank} of {dist.get_world_size()}, local {os.environ['LOCAL_RANK']}: {made} mean {mean}\\n")
dist.destroy_process_group()
"""


def unmodified_says(world_size: int, ranks_per_node: int) -> list[str]:
    """The sorted output lines of UNMODIFIED with our class, over shared memory on each node."""
    mean = sum(range(world_size)) / world_size
    return [
        f"rank {rank} of {world_size}, local {rank % ranks_per_node}: torchddp.ddp.module shm mean {mean}"
        for rank in range(world_size)
    ]


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without launchers' variables, for ranks that import this checkout."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS) and k not in TORCHRUNS}
    return {**clean, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **more}


def python(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with this checkout, or with the given PYTHONPATH."""
    command, clean = [sys.executable, *arguments], clean_environment(**environment)
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, env=clean)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run_together(
    commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]], timeout_s: float, cwd: Path = ROOT
) -> list[subprocess.CompletedProcess[str]]:
    """Run the commands concurrently and return their results; none is left running."""
    with ThreadPoolExecutor(len(commands)) as threads:
        started = [
            subprocess.Popen(
                command,
                env=environment,
                cwd=cwd,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for command, environment in zip(commands, environments, strict=True)
        ]
        try:
            said = list(threads.map(lambda process: process.communicate(timeout=timeout_s), started))
        finally:  # also if the run is interrupted
            for process in started:
                process.kill()
                process.wait()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *texts)
        for process, texts in zip(started, said, strict=True)
    ]
