"""An imitation of srun on this host: tasks with Slurm's variables, each on its own processor."""

import contextlib
import itertools
import os
import socket
import subprocess
from collections.abc import Callable

from tests.programs import clean_environment, run_together
from torchddp.harness.srun import torchrun_variables

Run = subprocess.CompletedProcess[str]
# srun(tasks, command, **environment) -> result
Srun = Callable[..., Run]


def task_variables(task: int, tasks: int, job: int = 1) -> dict[str, str]:
    """Slurm 22.05's variables of a one-node job that programs read."""
    host = socket.gethostname().partition(".")[0]
    of_the_step = {"STEP_ID": "0", "STEPID": "0", "STEP_NODELIST": host, "STEP_NUM_NODES": "1", "NTASKS": str(tasks)}
    of_the_step |= {"STEP_NUM_TASKS": str(tasks), "STEP_TASKS_PER_NODE": str(tasks), "NPROCS": str(tasks)}
    of_the_job = {"JOB_ID": str(job), "JOB_NODELIST": host, "NODELIST": host, "NNODES": "1"}
    own = {"PROCID": str(task), "LOCALID": str(task), "NODEID": "0", "CPU_BIND_TYPE": "mask_cpu:"}
    return {f"SLURM_{name}": value for name, value in {**of_the_step, **of_the_job, **own}.items()}


def _job_with_a_free_port() -> int:
    """An id of which `torchddp.run` makes a port that no program uses now, as Slurm's increasing ids do."""
    for job in itertools.count(os.getpid()):
        port = int(torchrun_variables(task_variables(0, 2, job))["MASTER_PORT"])
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return job
    raise AssertionError


def imitated_srun(timeout_s: float) -> Srun:
    """Run tasks with Slurm's variables, each on its own processor; collect their output."""

    def srun(tasks: int, *command: str, **more: str) -> Run:
        allowed = sorted(os.sched_getaffinity(0))
        commands = [["taskset", "--cpu-list", str(allowed[task % len(allowed)]), *command] for task in range(tasks)]
        job = _job_with_a_free_port()
        environments = [clean_environment(**task_variables(task, tasks, job), **more) for task in range(tasks)]
        done = run_together(commands, environments, timeout_s)
        code = max(abs(task.returncode) for task in done)
        return Run(command, code, "".join(task.stdout for task in done), "".join(task.stderr for task in done))

    return srun
