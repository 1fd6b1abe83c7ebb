"""A task of srun: `python -m tests.distributed.slurm_task FOLDER (train | die)`. Writes what it found to a file."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

import torchddp
from benchmarks.chaos.leaks import segments_of
from tests import framework
from tests.models import Mlp, seeded

LAST_STEP = 50


def train(rank: int) -> dict[str, Any]:
    """The weights of torch's class and of ours, of which install() makes this one."""
    expected = framework.train(TorchDDP(seeded(Mlp)), rank)
    torchddp.install()
    model: Any = framework.wrap(seeded(Mlp))
    found = framework.train(model, rank)
    return {
        "same": all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)),
        "class": type(model).__module__,
        "transport": model.reducer.transport.name,
        "processors": sorted(os.sched_getaffinity(0)),
        "torchrun's": sorted(os.environ.keys() & {"RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}),
    }


def die(rank: int) -> dict[str, Any]:
    """Rank 1 is killed in a step; what the others see, and hold afterwards."""
    model = torchddp.DDP(seeded(Mlp), transport="shm")
    inputs = torch.ones(2, 8, dtype=torch.float64)
    segments = segments_of()
    started_s, error = time.monotonic(), ""
    try:
        for step in range(LAST_STEP):
            if rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            started_s = time.monotonic()
            model(inputs).sum().backward()
    except torchddp.TransportError as failure:
        error = str(failure)
    seconds = time.monotonic() - started_s
    del model
    return {"error": error, "seconds": seconds, "segments": sorted(segments)}


def main(folder: Path, what: str) -> None:
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        rank, tasks = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
        dist.init_process_group("gloo", rank=rank, world_size=tasks)
    rank = dist.get_rank()
    found = {"train": train, "die": die}[what](rank)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if what == "die":
        os._exit(1)  # without the farewells of a group that has lost a rank
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
