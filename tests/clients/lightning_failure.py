"""A run in which one rank raises; each rank writes its error to FOLDER/errorN.txt and FOLDER/end_N.txt.

python -m tests.clients.lightning_failure FOLDER RUN START_METHOD FAILING_RANK

RUN is a name of `STRATEGIES`, or "saving": then the rank raises while rank 0 writes a checkpoint.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from tests.clients.lightning_models import QUIET, Plain, batches, quiet
from tests.harness import logged
from tests.unit.helpers import wait_until
from torchddp.integrations.lightning import TorchDDPFabricStrategy, TorchDDPShardedStrategy, TorchDDPStrategy

WHY = "the loss is not a number"
PATIENT_S = 300.0  # a grace longer than any run: a rank leaves because its peer is gone
STRATEGIES: dict[str, Any] = {
    "trainer": TorchDDPStrategy,
    "sharded": TorchDDPShardedStrategy,
    "fabric": TorchDDPFabricStrategy,
}


class Clock(pl.Callback):
    """Writes the exception that ended a rank's training to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        (self.folder / f"error{trainer.global_rank}.txt").write_text(f"{type(error).__name__}: {error}")


class SlowIO(TorchCheckpointIO):
    """Writes the file long after the grace, and after Lightning would kill the processes because one ended."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        reports = logged()
        (Path(path).parent / "saving").touch()
        assert wait_until(lambda: reports, 60.0)
        (Path(path).parent / "report").write_text(reports[0])
        time.sleep(7.0)
        super().save_checkpoint(checkpoint, path, storage_options)


class FailsWhileSaving(Plain):
    def __init__(self, folder: Path, failing: int) -> None:
        super().__init__()
        self.folder, self.failing = folder, failing

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        if self.global_rank == self.failing:
            assert wait_until((self.folder / "saving").exists, 60.0)
            raise ValueError(WHY)


def _fabric_training(fabric: Any, failing: int) -> None:
    model = fabric.setup(Plain().net)
    for index, (x, y) in enumerate(fabric.setup_dataloaders(batches())):
        if (fabric.global_rank, index) == (failing, 3):
            raise ValueError(WHY)
        fabric.backward((model(x) - y).square().mean())


def _save(folder: Path, failing: int) -> None:
    trainer = pl.Trainer(
        **{**QUIET, "enable_checkpointing": True},
        strategy=TorchDDPStrategy(fail_together_grace_s=0.1, checkpoint_io=SlowIO()),
        callbacks=[ModelCheckpoint(folder, filename="whole", every_n_train_steps=2)],
        max_epochs=1,
    )
    trainer.fit(FailsWhileSaving(folder, failing), batches())


def _run(folder: Path, run: str, start_method: str, failing: int) -> None:
    if run == "saving":
        _save(folder, failing)
        return
    strategy = STRATEGIES[run](start_method=start_method, fail_together_grace_s=PATIENT_S)
    if run == "fabric":
        Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(_fabric_training, failing)
    else:
        trainer = pl.Trainer(strategy=strategy, max_epochs=1, callbacks=[Clock(folder)], **QUIET)
        trainer.fit(Plain(fails_on=(failing, 3)), batches())


def main(folder: Path, run: str, start_method: str, failing: int) -> None:
    quiet()
    try:
        _run(folder, run, start_method, failing)
    except Exception as error:
        rank = os.environ.get("LOCAL_RANK", "launcher")
        (folder / f"end_{rank}.txt").write_text(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
