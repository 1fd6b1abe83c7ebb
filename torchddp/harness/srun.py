"""Ranks that Slurm's srun has started: what torchrun would have told them, from what srun does."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

# Below those that Linux hands out by itself.
_FIRST_PORT, _PORTS = 20_000, 10_000


def tell_ranks() -> None:
    """In a task of a step of several: RANK, WORLD_SIZE and so on join this process's environment, where a program or
    init_process_group looks for them. What is set already stays; elsewhere, and where RANK is set, nothing happens."""
    if "RANK" not in os.environ:
        for name, value in torchrun_variables(os.environ).items():
            os.environ.setdefault(name, value)


def torchrun_variables(slurm: Mapping[str, str]) -> dict[str, str]:
    """Those of a task among several; none elsewhere, also not in a batch script, which has a SLURM_PROCID too.

    The port of the store is made of the numbers of job and step, and so is the same on all hosts.
    """
    names = ("SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if any(not slurm.get(name) for name in names) or slurm["SLURM_STEP_NUM_TASKS"] == "1":
        return {}
    step = int(slurm.get("SLURM_JOB_ID", "0")) * 7 + int(slurm["SLURM_STEP_ID"])
    found = {
        "RANK": slurm["SLURM_PROCID"],
        "WORLD_SIZE": slurm["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "MASTER_ADDR": first_host(slurm["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(_FIRST_PORT + step % _PORTS),
    }
    by_node = tasks_by_node(slurm.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = int(slurm.get("SLURM_NODEID", "0"))
    if node < len(by_node):
        found["LOCAL_WORLD_SIZE"] = str(by_node[node])
    return found


def first_host(nodes: str) -> str:
    """Of a list as Slurm writes them: "node[08-11,20],login" begins with node08."""
    name = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", name)


def tasks_by_node(tasks: str) -> list[int]:
    """Of a list as Slurm writes them: "2(x3),1" is 2, 2, 2, 1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    return [int(count) for count, times in found for _ in range(int(times or 1))]
