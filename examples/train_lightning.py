"""Lightning with torchddp: only the strategy's name changes.

    python -m examples.train_lightning --strategy torchddp --devices 2
    python -m examples.train_lightning --strategy torchddp_sharded --devices 2 --epochs 4

Needs lightning. Trains a small network to tell two spirals apart; the data is generated.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchddp.integrations.lightning  # noqa: F401  registers the strategies' names


def spirals(points: int, seed: int) -> TensorDataset:
    """Points ``[points, 2]`` on two spirals, and which of the two each is on (0 or 1)."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (points,), generator=generator)
    angle = 3 * math.pi * torch.rand(points, generator=generator).sqrt()
    turned = angle + math.pi * label
    place = torch.stack([turned.cos(), turned.sin()], dim=1) * angle[:, None] / (3 * math.pi)
    return TensorDataset(place + 0.02 * torch.randn(points, 2, generator=generator), label.float())


class Classifier(pl.LightningModule):
    """Three layers that predict which spiral a point is on."""

    def __init__(self, width: int, learning_rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(2, width),
            torch.nn.SiLU(),
            torch.nn.Linear(width, width),
            torch.nn.SiLU(),
            torch.nn.Linear(width, 1),
        )

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        place, label = batch
        loss = torch.nn.functional.binary_cross_entropy_with_logits(self.net(place).squeeze(1), label)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        place, label = batch
        right = (self.net(place).squeeze(1) > 0) == (label > 0)
        self.log("accuracy", right.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams["learning_rate"], total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="torchddp", help="torchddp, torchddp_sharded, torchddp_spawn, ... or ddp")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--points", type=int, default=2048)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--save", metavar="FILE", help="where to write a checkpoint at the end")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    pl.seed_everything(0, verbose=False)
    module = Classifier(options.width, options.learning_rate)
    trainer = pl.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=options.strategy,
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train, held_out = spirals(options.points, seed=1), spirals(512, seed=2)
    trainer.fit(module, DataLoader(train, batch_size=64, shuffle=True), DataLoader(held_out, batch_size=128))
    if options.save:
        trainer.save_checkpoint(options.save)
    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics["accuracy"])
        print(f"strategy {options.strategy}: {accuracy:.1%} of {len(held_out)} points after {options.epochs} epochs")


if __name__ == "__main__":
    main()
