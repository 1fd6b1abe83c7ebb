"""Parent side: starts the ranks inside the namespaces, follows them, and leaves no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.two_hosts.network import INTERFACE, RANKS_PER_HOST, Host, inside
from torchddp.harness.launch import ONE_THREAD, Inbox, Progress, RankSettings, follow

# The first host's namespace is new and used by nothing else, so every port is free there.
STORE_PORT = 29500


def host_of(rank: int, hosts: Sequence[Host], ranks_per_host: int) -> Host:
    """Ranks 0 and 1 on the first host, 2 and 3 on the second."""
    return hosts[rank // ranks_per_host]


def worker_command(host: Host, worker: str, descriptor: int) -> list[str]:
    """The command that starts one rank on its host; the rank talks to us through the inherited descriptor."""
    return inside(host.namespace, [sys.executable, "-m", worker, str(descriptor)])


def worker_environment() -> dict[str, str]:
    """Points gloo to the slow link and passes on our import path, so that ranks can load the user's classes."""
    # Addresses in a namespace have no names: silence the warnings and shorten DNS lookups, which no server answers.
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "RES_OPTIONS": "attempts:1 timeout:1"}
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    return {**os.environ, **ONE_THREAD, **quiet, "GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": path}


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait(timeout=10)


def launch_on_hosts(
    job: RankSettings,
    hosts: Sequence[Host],
    progress: Progress,
    stall_timeout_s: float,
    *,
    worker: str = "benchmarks.two_hosts.worker",
    ranks_per_host: int = RANKS_PER_HOST,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run the module `worker` in a new process per rank, each on its host; return rank 0's results."""
    init_method = f"tcp://{hosts[0].address}:{STORE_PORT}"
    full_environment = {**worker_environment(), **(environment or {})}
    processes: list[subprocess.Popen[bytes]] = []
    channels: list[Connection] = []
    try:
        for rank in range(job.world_size):
            channel, theirs = Pipe()
            channels.append(channel)
            # In their own session, so that Ctrl-C reaches only this process, which then ends the ranks.
            processes.append(
                subprocess.Popen(
                    worker_command(host_of(rank, hosts, ranks_per_host), worker, theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    env=full_environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )
            channel.send((rank, job, init_method))
            theirs.close()
        return follow(Inbox(channels, progress), job, stall_timeout_s)
    finally:
        _stop(processes)
