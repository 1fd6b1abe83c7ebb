"""Loops of Accelerate that are right, on a rank: prints the warnings about traps."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import torchddp
from tests.clients.common import tell_traps


def main() -> None:
    torchddp.install()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    model, optimizer, loader = accelerator.prepare(
        module, torch.optim.AdamW(module.parameters(), 0.01), DataLoader(TensorDataset(torch.randn(88, 8)), 4)
    )
    assert isinstance(model, torchddp.DistributedDataParallel)
    for _ in range(2):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        for (x,) in loader:
            model(x).square().mean().item()
        model.train()
    for (x,) in loader:
        with accelerator.no_sync(model):
            loss = model(x).square().mean() + model(x).square().mean()
        accelerator.trigger_sync_in_backward(model)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    tell_traps(main)
