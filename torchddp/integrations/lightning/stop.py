"""Trainers that stop together: `torchddp.StopTogether` as a callback."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from torchddp.durations import Duration, seconds
from torchddp.sync.stop_together import SIGNALS, StopTogether


class StopTogetherCallback(pl.Callback):
    """Ends training on all ranks after the same batch, when any of them gets a signal, and saves a checkpoint.

    It takes the place of Lightning's handling of SIGTERM while the Trainer trains: a broadcast before every batch, and
    another in the signal handler, which waits for ranks that got no signal. Batches count, so it works with any
    strategy, under gradient accumulation too. After the batch, training ends as with ``trainer.should_stop``, whatever
    ``min_steps`` and ``min_epochs`` say: the hooks at the end of the epoch run, and `fit` returns.

    Args:
        path: where to save a checkpoint when it stops, for ``fit(ckpt_path=)``; None: nowhere.
        signals, grace_s: as for `torchddp.StopTogether`.

    Attributes:
        reason: why training has stopped, such as 'SIGTERM on rank 1'; None if it was not asked to.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        signals: Iterable[int] = SIGNALS,
        grace_s: Duration | None = 300.0,
    ) -> None:
        seconds(grace_s, "grace_s")  # checks it
        self.reason: str | None = None
        self._path, self._signals, self._grace_s = path, tuple(signals), grace_s
        self._stop: StopTogether | None = None
        self._is_done = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the signals from Lightning."""
        self._is_done, self.reason = False, None
        self._stop = StopTogether(signals=self._signals, grace_s=self._grace_s)
        loop: Any = trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor = lambda: None  # looked up before every batch

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        """Check, and stop."""
        if self._is_done or self._stop is None or not self._stop:
            return
        self._is_done, self.reason = True, self._stop.reason
        trainer.fit_loop.min_epochs = None
        trainer.fit_loop.epoch_loop.min_steps = None
        trainer.should_stop = True
        if self._path is not None:
            trainer.save_checkpoint(self._path)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the signals back to Lightning."""
        vars(trainer.fit_loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)
        if self._stop is not None:
            self._stop.close()
            self._stop = None
