"""The workers of test_ray.py: a small training with checkpoints, in which one worker may die."""

import json
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.clients.common import digest

EPOCHS, SAMPLES, BATCH = 4, 48, 4
STEPS = SAMPLES // BATCH // 2  # per epoch for each of two workers
DEATHS: dict[str, Callable[[], None]] = {
    "exit": lambda: os._exit(1),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def train(config: dict[str, Any]) -> None:
    """The training function. Each worker writes its results to ``folder``, even if it fails.

    ``config`` has ``case`` and ``folder``. Optional keys: ``installed`` (call torchddp.install()), ``imported`` (import
    torchddp before wrapping), ``options`` of the wrapper, and ``death`` (worker 1 dies once).
    """
    if "installed" in config or "imported" in config:
        import torchddp

        if "installed" in config:
            torchddp.install()
    torch.set_num_threads(1)
    file = Path(config["folder"], f"{config['case']}.{ray.train.get_context().get_world_rank()}")
    try:
        found = fit(config)
    except Exception as error:
        file.with_suffix(f"{file.suffix}.failed").write_text(f"{type(error).__name__}: {error}")
        raise
    file.with_suffix(f"{file.suffix}.json").write_text(json.dumps(found))


def fit(config: dict[str, Any]) -> dict[str, Any]:
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(5, 33), nn.BatchNorm1d(33), nn.Tanh(), nn.Linear(33, 1025), nn.Linear(1025, 3))
    model = ray.train.torch.prepare_model(net, parallel_strategy_kwargs=config.get("options"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = ray.train.torch.prepare_data_loader(DataLoader(samples(), batch_size=BATCH, shuffle=True))
    first = restore(model, optimizer)
    for epoch in range(first, EPOCHS):
        loader.sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            if "death" in config and (first, epoch, step, rank) == (0, 2, STEPS // 2, 1):
                DEATHS[config["death"]]()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        save(model, optimizer, epoch, rank)

    import torchddp

    return {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "weights": digest(model.named_parameters()),
        "first epoch": first,
        "steps": torchddp.finished_steps(),
        "transport": model.session.options.transport if isinstance(model, torchddp.DDP) else "torch's",
    }


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 5, generator=generator)
    return TensorDataset(x, torch.randint(3, (SAMPLES,), generator=generator))


def save(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int, rank: int) -> None:
    """Report a checkpoint of worker 0; every worker must report."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, Path(folder, "state.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"epoch": epoch}, checkpoint=checkpoint)


def restore(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint, if any; return the next epoch."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder, "state.pt"))
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"] + 1
