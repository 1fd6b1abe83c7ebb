"""A one-node Slurm on this host for tests, and an imitation of srun for hosts without Slurm.

    python -m tests.slurm srun --ntasks 2 --cpu-bind threads python train.py

starts munge, slurmctld and slurmd (Debian: apt-get install slurmd slurmctld slurm-client munge), runs the command, and
stops them.
"""

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.programs import clean_environment, free_port, run_together
from torchddp.harness.srun import torchrun_variables

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")
READY_TIMEOUT_S = 120.0
CONFIGURATION = """
ClusterName=torchddp
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={processors} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP OverSubscribe=YES
"""

Run = subprocess.CompletedProcess[str]
# srun(tasks, command, **environment) -> result
Srun = Callable[..., Run]


def reason_against() -> str:
    """Why Slurm can't run here; empty if it can."""
    # Daemons are in /usr/sbin, which may not be in PATH.
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        return f"no Slurm ({', '.join(missing)} missing): apt-get install slurmd slurmctld slurm-client munge"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


@contextlib.contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Yield the environment in which srun and sbatch find a cluster on this host. RuntimeError if it doesn't start."""
    # Not pytest's folder: Unix socket paths must be short, and munge refuses folders that others can write to.
    folder = Path(tempfile.mkdtemp(prefix="torchddp-slurm-"))
    environment = clean_environment(SLURM_CONF=str(folder / "slurm.conf"))
    environment["PATH"] += ":/usr/sbin:/sbin"
    started: list[Path] = []
    try:
        _configure(folder)
        files = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        munge = ["munged", "--force", *files, f"--socket={folder}/munge.socket"]
        for name, command in (("munge", munge), ("slurmctld", ["slurmctld"]), ("slurmd", ["slurmd"])):
            started.append(folder / f"{name}.pid")
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=READY_TIMEOUT_S)
            if done.returncode != 0:
                raise RuntimeError(f"{name} did not start: {done.stderr}")
        _await_idle(environment, folder)
        yield environment
    finally:
        for path in reversed(started):
            _end(path)
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path) -> None:
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    host, ports = socket.gethostname().partition(".")[0], {"controller_port": free_port(), "node_port": free_port()}
    text = CONFIGURATION.format(host=host, folder=folder, processors=os.cpu_count(), **ports)
    (folder / "slurm.conf").write_text(text)


def _await_idle(environment: Mapping[str, str], folder: Path) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                ["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, timeout=60
            )
            if done.stdout.strip() == "idle":
                return
        time.sleep(0.2)
    logs = [line for path in folder.glob("slurm*.log") for line in path.read_text().splitlines()[-5:]]
    raise RuntimeError("\n".join(["the node did not come up", *logs]))


def _end(pid_file: Path) -> None:
    """End a daemon started here, by the process id in its file."""
    with contextlib.suppress(OSError, ValueError):
        pid = int(pid_file.read_text())
        os.kill(pid, signal.SIGTERM)
        for _ in range(100):
            os.kill(pid, 0)
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)


def real_srun(environment: Mapping[str, str], timeout_s: float) -> Srun:
    def srun(tasks: int, *command: str, **more: str) -> Run:
        options = ["--ntasks", str(tasks), "--cpu-bind", "threads", "--wait", "60"]
        if tasks > (os.cpu_count() or 1):
            options.append("--overcommit")
        return subprocess.run(
            ["srun", *options, *command], env={**environment, **more}, capture_output=True, text=True, timeout=timeout_s
        )

    return srun


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


if __name__ == "__main__":
    if problem := reason_against():
        sys.exit(problem)
    with cluster() as found:
        sys.exit(subprocess.run(sys.argv[1:], env=found).returncode)
