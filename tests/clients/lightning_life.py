"""The lifetime of wrappers before, after and between fits."""

import gc
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric

import torchddp
from tests.clients.common import save_results
from tests.clients.lightning_models import QUIET, Plain, batches, quiet
from torchddp.integrations.lightning import TorchDDPFabricStrategy

# The strategy that saves a checkpoint, and the one that resumes from it.
RESUMED = [("torchddp", "ddp"), ("torchddp_sharded", "ddp"), ("ddp", "torchddp"), ("ddp", "torchddp_sharded")]
RESUMED += [("torchddp_sharded", "torchddp_sharded")]


class Watching(pl.Callback):
    """A callback that keeps weak references to wrappers."""

    def __init__(self) -> None:
        self.wrappers: list[Any] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.wrappers.append(weakref.ref(trainer.model))


def fit_twice_and_test(strategy: str) -> dict[str, Any]:
    """Also check that the wrapper is freed, and that the module is usable and trains without it."""
    module, watching = Plain(), Watching()
    trainer = pl.Trainer(strategy=strategy, max_epochs=1, callbacks=[watching], **QUIET)
    trainer.fit(module, batches())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, batches())
    tested = trainer.test(module, batches(), verbose=False)
    state = {key: value.clone() for key, value in module.state_dict().items()}
    gc.collect()
    freed = [wrapper() is None for wrapper in watching.wrappers]
    module.net(torch.ones(2, 8)).sum().backward()  # a leftover reducer hook would wait for the other rank
    return {
        "state": state,
        "tested": tested,
        "freed": freed,
        "gradients": all(param.grad is not None for param in module.parameters()),
        "storages": [param.untyped_storage().nbytes() == param.nbytes for param in module.parameters()],
        "hooks": [len(part._forward_pre_hooks) for part in module.modules()],
    }


def checkpoints(folder: Path, first: str, second: str) -> dict[str, Any]:
    """An epoch under one strategy, then another under the next, from a checkpoint saved after teardown."""
    path = folder / f"{first}.ckpt"
    options = {"optimizer": torch.optim.AdamW, "schedule": True}
    trainer = pl.Trainer(strategy=first, max_epochs=1, **QUIET)
    trainer.fit(Plain(**options), batches())
    trainer.save_checkpoint(path)
    module = Plain(**options)
    pl.Trainer(strategy=second, max_epochs=2, **QUIET).fit(module, batches(), ckpt_path=path, weights_only=False)
    saved = torch.load(path, weights_only=False)
    shapes = [
        {key: tuple(value.shape) if torch.is_tensor(value) else value for key, value in of_one.items()}
        for of_one in saved["optimizer_states"][0]["state"].values()
    ]
    return {
        "state": module.state_dict(),
        "keys": sorted(saved),
        "model_keys": sorted(saved["state_dict"]),
        "optimizer": shapes,
        "groups": saved["optimizer_states"][0]["param_groups"],
    }


def _fabric_training(fabric: Any, accumulate: bool) -> dict[str, torch.Tensor]:
    module = Plain().net
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    model, optimizer = fabric.setup(module, optimizer)
    for index, (x, y) in enumerate(fabric.setup_dataloaders(batches())):
        skip = accumulate and index % 2 == 0
        with fabric.no_backward_sync(model, enabled=skip):
            fabric.backward((model(x) - y).square().mean())
        if not skip:
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
    return {key: value.clone() for key, value in model.state_dict().items()}


def fabric(strategy: Any, accumulate: bool) -> dict[str, Any]:
    """A user-defined loop."""
    before = torchddp.finished_steps()
    runner = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    state = runner.launch(_fabric_training, accumulate)
    return {"state": state, "finished": torchddp.finished_steps() - before}


def find(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for strategy in ("ddp", "torchddp", "torchddp_sharded"):
        results[f"twice {strategy}"] = fit_twice_and_test(strategy)
    for first, second in [("ddp", "ddp"), *RESUMED]:
        results[f"checkpoint {first} {second}"] = checkpoints(folder, first, second)
    for accumulate in (False, True):
        for choice in ("ddp", "torchddp", TorchDDPFabricStrategy(static_graph=not accumulate)):
            name = choice if isinstance(choice, str) else "instance"
            results[f"fabric {name} {accumulate}"] = fabric(choice, accumulate)
    return results


if __name__ == "__main__":
    quiet()
    save_results(find)
