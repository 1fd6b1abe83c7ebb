"""LightningModules of the tests, and their data."""

import logging
import os
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 48
BATCH = 4
SILENT = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
QUIET: dict[str, Any] = {"accelerator": "cpu", "devices": 2, **dict.fromkeys(SILENT, False)}


def quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def batches() -> DataLoader:
    """12 batches, 6 for each of two ranks."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 8, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=BATCH)


class Plain(pl.LightningModule):
    """Two layers, with features chosen by ``options``."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.BatchNorm1d(16) if options.get("batch_norm") else torch.nn.Tanh(),
            torch.nn.Linear(16, 1),
        )
        if options.get("unused"):
            self.other = torch.nn.Linear(8, 1)
        self.seen: list[float] = []

    def loss(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        out = self.net(x)
        if self.options.get("unused") == "sometimes" and index % 2:
            out = out + self.other(x)
        return (out - y).square().mean()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.options.get("fails_on") == (self.global_rank, index):
            raise ValueError("the loss is not a number")
        loss = self.loss(batch, index)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", self.loss(batch, 0), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test_loss", self.loss(batch, 0), sync_dist=True)

    def configure_optimizers(self) -> Any:
        kind = self.options.get("optimizer", torch.optim.SGD)
        given = dict(lr=0.05, momentum=0.9) if kind is torch.optim.SGD else dict(lr=0.01)
        optimizer = kind(self.parameters(), **given)
        if not self.options.get("schedule"):
            return optimizer
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=3)
        decay = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
        both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], milestones=[3])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": both, "interval": "step"}}


class Manual(Plain):
    """Manual optimization; every second step only accumulates."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        if self.options.get("accumulate") and index % 2 == 0:
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(self.loss(batch, index))
            return
        self.manual_backward(self.loss(batch, index))
        if self.options.get("clip"):
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()


class TwoOptimizers(pl.LightningModule):
    """Like a GAN: optimizers step in turn, with the other's parameters frozen."""

    signs, rate = (1.0, -0.5), 0.05

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.maker, self.judge = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
        self.seen: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return (self.judge(self.maker(x).tanh()) - y).square().mean()

    def training_step(self, batch: Any, index: int) -> None:
        for optimizer, sign in zip(self.optimizers(), self.signs, strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(sign * self.loss(batch))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=self.rate) for part in (self.maker, self.judge)]


class LocalSGD(Plain):
    """Post-local SGD without averages after the warm-up; its subgroups need a process group."""

    def setup(self, stage: str) -> None:
        self.trainer.strategy._ddp_comm_state.subgroup, _ = dist.new_subgroups(group_size=1)
