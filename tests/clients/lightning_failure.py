"""A run in which one rank raises; each rank writes its error to FOLDER/errorN.txt and FOLDER/end_N.txt.

python -m tests.clients.lightning_failure FOLDER STRATEGY FAILING_RANK
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric import Fabric

import torchddp  # noqa: F401 (registers its strategies with Lightning)
from tests.clients.lightning_models import QUIET, Plain, batches, quiet


class Clock(pl.Callback):
    """Writes the exception that ended a rank's training to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        (self.folder / f"error{trainer.global_rank}.txt").write_text(f"{type(error).__name__}: {error}")


def _fabric_training(fabric: Any, failing: int) -> None:
    model = fabric.setup(Plain().net)
    for index, (x, y) in enumerate(fabric.setup_dataloaders(batches())):
        if (fabric.global_rank, index) == (failing, 3):
            raise ValueError("the loss is not a number")
        fabric.backward((model(x) - y).square().mean())


def main(folder: Path, strategy: str, failing: int) -> None:
    quiet()
    try:
        if strategy.startswith("fabric:"):
            runner = Fabric(accelerator="cpu", devices=2, strategy=strategy.removeprefix("fabric:"))
            runner.launch(_fabric_training, failing)
        else:
            trainer = pl.Trainer(strategy=strategy, max_epochs=1, callbacks=[Clock(folder)], **QUIET)
            trainer.fit(Plain(fails_on=(failing, 3)), batches())
    except Exception as error:
        rank = os.environ.get("LOCAL_RANK", "launcher")
        (folder / f"end_{rank}.txt").write_text(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
