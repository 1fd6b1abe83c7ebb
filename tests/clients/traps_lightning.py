"""Loops of Lightning that are right, on a rank: prints the warnings about traps."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchddp
from tests.clients.common import tell_traps
from tests.clients.lightning_models import QUIET


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", self.net(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)


def main() -> None:
    torchddp.install()
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), 4)
    before = torchddp.finished_steps()
    for settings in ({}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}):
        trainer = pl.Trainer(strategy="ddp", max_epochs=2, **QUIET, **settings)
        trainer.fit(Module(), loader, loader)
    assert torchddp.finished_steps() > before


if __name__ == "__main__":
    tell_traps(main)
