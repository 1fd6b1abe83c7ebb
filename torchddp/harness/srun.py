"""For ranks started by Slurm's srun: derives the variables that torchrun would set from those that srun sets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

# Below Linux's ephemeral ports.
_FIRST_PORT, _PORTS = 20_000, 10_000


def set_rank_variables() -> None:
    """In a step of several tasks, set torchrun's variables that are not set, unless RANK is."""
    if "RANK" not in os.environ:
        for name, value in torchrun_variables(os.environ).items():
            os.environ.setdefault(name, value)


def torchrun_variables(slurm: Mapping[str, str]) -> dict[str, str]:
    """For one of several tasks; none elsewhere, nor in a batch script, which has a SLURM_PROCID too."""
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
    """The first host of a list in Slurm's notation: node08 for "node[08-11,20],login"."""
    name = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", name)


def tasks_by_node(tasks: str) -> list[int]:
    """The numbers of a list in Slurm's notation: [2, 2, 2, 1] for "2(x3),1"."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
    return [int(count) for count, times in found for _ in range(int(times or 1))]
