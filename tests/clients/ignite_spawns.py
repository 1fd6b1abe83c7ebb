"""A program of test_engines.py: ignite starts two processes, each of which calls install().

python -m tests.clients.ignite_spawns FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from torch import nn

import torchddp
from tests.clients.common import digest


def train() -> dict[str, Any]:
    torch.manual_seed(0)
    before = torchddp.finished_steps()
    model = idist.auto_model(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(1 + idist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.randint(3, (4,))).backward()
        optimizer.step()
    return {
        "class": type(model).__module__,
        "steps": torchddp.finished_steps() - before,
        "weights": digest(model.named_parameters()),
    }


def training(local_rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    found = {"torch": train()}
    torchddp.install()
    found["ours"] = train()
    Path(folder, f"rank{idist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    with idist.Parallel(backend="gloo", nproc_per_node=2) as parallel:
        parallel.run(training, sys.argv[1])
