"""Ranks that srun starts, by an imitation of it: tasks of one node with Slurm's variables."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

import torchddp
from tests import framework
from tests.models import Mlp, seeded
from tests.pages import code_of, signalled
from tests.programs import CLAIM, ROOT, UNMODIFIED, clean_environment, free_port, run_together, unmodified_says
from torchddp.harness.srun import torchrun_variables

TASK = (sys.executable, "-m", "tests.distributed.test_slurm")
TIMEOUT_S = 170

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


def task_variables(task, tasks, job=1):
    """Slurm 22.05's variables of a one-node job that programs read."""
    host = socket.gethostname().partition(".")[0]
    of_the_step = {"STEP_ID": "0", "STEPID": "0", "STEP_NODELIST": host, "STEP_NUM_NODES": "1", "NTASKS": str(tasks)}
    of_the_step |= {"STEP_NUM_TASKS": str(tasks), "STEP_TASKS_PER_NODE": str(tasks), "NPROCS": str(tasks)}
    of_the_job = {"JOB_ID": str(job), "JOB_NODELIST": host, "NODELIST": host, "NNODES": "1"}
    own = {"PROCID": str(task), "LOCALID": str(task), "NODEID": "0", "CPU_BIND_TYPE": "mask_cpu:"}
    return {f"SLURM_{name}": value for name, value in {**of_the_step, **of_the_job, **own}.items()}


def job_with_a_free_port():
    """An id of which `torchddp.run` makes a port that no program uses now, as Slurm's increasing ids do."""
    for job in itertools.count(os.getpid()):
        port = int(torchrun_variables(task_variables(0, 2, job))["MASTER_PORT"])
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return job


def srun(tasks, *command, **more):
    """Run tasks with Slurm's variables, each on its own processor; collect their output."""
    allowed = sorted(os.sched_getaffinity(0))
    commands = [["taskset", "--cpu-list", str(allowed[task % len(allowed)]), *command] for task in range(tasks)]
    job = job_with_a_free_port()
    environments = [clean_environment(**task_variables(task, tasks, job), **more) for task in range(tasks)]
    done = run_together(commands, environments, TIMEOUT_S)
    code = max(abs(task.returncode) for task in done)
    output, errors = ("".join(getattr(task, what) for task in done) for what in ("stdout", "stderr"))
    return subprocess.CompletedProcess(command, code, output, errors)


@pytest.fixture
def settings():
    """The variables that the batch script of docs/launchers.md exports."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def found_by(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


@pytest.mark.parametrize("tasks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_tasks_of_a_node_share_memory_with_torchs_weights(settings, tmp_path, tasks):
    done = srun(tasks, *TASK, str(tmp_path), **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    found = found_by(tmp_path)
    assert len(found) == tasks
    for task in found:
        assert task["class"] == "torchddp.ddp.module" and task["transport"] == "shm"
        assert task["torchrun's"] == [] and len(task["processors"]) == 1
        assert task["same"] or tasks > 2  # gloo adds more than two in another order
    if tasks == 2 and len(os.sched_getaffinity(0)) > 1:
        assert found[0]["processors"] != found[1]["processors"]
    assert done.stderr.count(CLAIM) == 1, done.stderr  # one task only, although RANK is not set


@pytest.mark.slow
def test_tasks_with_private_folders_share_memory(settings, tmp_path):
    """As with Slurm's job_container/tmpfs: no task sees another's /dev/shm."""
    own = f"mount -t tmpfs none /dev/shm && exec {' '.join(TASK)} {tmp_path}"
    done = srun(2, "unshare", "--mount", "sh", "-c", own, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [task["transport"] for task in found_by(tmp_path)] == ["shm", "shm"]


@pytest.mark.slow
def test_unmodified_programs_under_run(tmp_path):
    """torchddp.run sets MASTER_ADDR and MASTER_PORT."""
    (tmp_path / "program.py").write_text(UNMODIFIED)
    done = srun(2, sys.executable, "-m", "torchddp.run", str(tmp_path / "program.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == unmodified_says(2, 2)
    assert done.stderr.count(CLAIM) == 1


def test_the_pages_program(settings, tmp_path):
    (tmp_path / "train.py").write_text(code_of("launchers.md", "One task per rank"))
    done = srun(2, sys.executable, str(tmp_path / "train.py"), **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2 reduces over shm" for rank in range(2)]


def train(rank):
    """Compare weights trained with torch's class and with ours from install()."""
    expected = framework.train(TorchDDP(seeded(Mlp)), rank)
    torchddp.install()
    model = framework.wrap(seeded(Mlp))
    found = framework.train(model, rank)
    return {
        "same": all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)),
        "class": type(model).__module__,
        "transport": model.reducer.transport.name,
        "processors": sorted(os.sched_getaffinity(0)),
        "torchrun's": sorted(os.environ.keys() & {"RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}),
    }


def main(folder):
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        rank, tasks = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
        dist.init_process_group("gloo", rank=rank, world_size=tasks)
    rank = dist.get_rank()
    (folder / f"{rank}.json").write_text(json.dumps(train(rank)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))


GPT = "--layers 1 --width 16 --heads 2 --block-size 16 --batch-size 2 --eval-interval 100000 --eval-batches 1".split()


@pytest.mark.slow
def test_a_signal_before_the_time_limit_saves_and_the_next_run_resumes(settings, tmp_path):
    """As the batch script of docs/fault_tolerance.md does."""
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    saved = tmp_path / "gpt.pt"

    def train(*more):
        arguments = ["run", "examples/train_gpt.py", "--data", str(tmp_path / "text"), "--checkpoint", str(saved)]
        code = f"import runpy, sys\nsys.argv = {[*arguments, *GPT, '--steps', '100000', *more]}\n"
        code += "runpy.run_module('torchddp.run', run_name='__main__')\n"
        program = tmp_path / "program.py"
        program.write_text(code if more else signalled(code, signal.SIGUSR1))
        done = srun(2, sys.executable, str(program), **settings, PYTHONPATH=str(ROOT))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    (step,) = re.findall(r"^stopped after step (\d+): SIGUSR1 on rank 1$", train(), re.MULTILINE)
    assert torch.load(saved, weights_only=True)["step"] == int(step) >= 20
    train("--resume", "--stop-after", str(int(step) + 5))
    assert torch.load(saved, weights_only=True)["step"] == int(step) + 5
