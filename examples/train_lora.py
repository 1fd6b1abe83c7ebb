"""Adapters (LoRA, Hu et al. 2021) for a model that is already wrapped: freeze the base and train the adapters.

torchrun --nproc-per-node 2 -m examples.train_lora
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

if not __package__:  # started by path: make `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.gpt.ranks import Ranks
from examples.small import loss_of, make_model, report, run
from torchddp import DistributedDataParallel as DDP

RANK = 4


class LowRank(nn.Module):
    """An unchanged linear layer plus the product of two thin matrices, which starts at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def add_adapters(module: nn.Module) -> list[torch.Tensor]:
    """Freeze the module, add an adapter to each linear layer in it, and return the adapters' parameters."""
    module.requires_grad_(False)
    linear = [(m, name, c) for m in module.modules() for name, c in m.named_children() if isinstance(c, nn.Linear)]
    adapters = []
    for parent, name, layer in linear:
        adapter = LowRank(layer)
        setattr(parent, name, adapter)
        adapters += [adapter.down.weight, adapter.up.weight]
    return adapters


def train(ranks: Ranks, steps: int, lr: float) -> None:
    """Train the model for the first third of the steps, then its adapters."""
    model = DDP(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        if step == steps // 3:
            base = [p.detach().clone() for p in model.parameters()]
            adapters = add_adapters(model.module)
            model.refresh_trainable()  # on all ranks; the adapters get rank 0's values
            optimizer = torch.optim.AdamW(adapters, lr=lr)
        loss = loss_of(model, ranks.rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(ranks, step, steps, loss)
    if ranks.rank == 0:
        frozen = [p for p in model.parameters() if not p.requires_grad]
        kept = all(torch.equal(a, b) for a, b in zip(base, frozen, strict=True))
        trained = sum(p.numel() for p in adapters)
        print(f"{trained} trained adapter weights; {sum(p.numel() for p in base)} frozen weights, changed: {not kept}")


def main() -> None:
    """Join the process group, train, and leave it."""
    run(train, "Add LoRA adapters to a model that is already wrapped.", steps=150)


if __name__ == "__main__":
    main()
