"""Layer-wise unfreezing (ULMFiT, Howard and Ruder 2018): train the head first, then one more block at a time.

torchrun --nproc-per-node 2 -m examples.train_unfreezing
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

if not __package__:  # started by path: make `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.gpt.ranks import Ranks
from examples.small import loss_of, make_model, report, run
from torchddp import DistributedDataParallel as DDP


def train(ranks: Ranks, steps: int, lr: float) -> None:
    """Train in stages of equal length, one for each part of the model."""
    module = make_model()
    parts = [module.head, *reversed(module.blocks)]
    module.requires_grad_(False)
    module.head.requires_grad_(True)
    # Frozen parameters may be in the optimizer: it skips parameters without a gradient.
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
    model = DDP(module, auto_refresh_trainable=True)
    sent = []
    for step in range(steps):
        stage = step * len(parts) // steps
        parts[stage].requires_grad_(True)  # on all ranks; the next forward notices
        loss = loss_of(model, ranks.rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(ranks, step, steps, loss)
        if step == (stage + 1) * steps // len(parts) - 1:
            sent.append(model.reducer.stats()["bytes_reduced"])
    if ranks.rank == 0:
        print(f"gradient bytes per step, by stage: {', '.join(map(str, sent))}")
        print(f"updates of the head: {int(optimizer.state[module.head.weight]['step'])}")


def main() -> None:
    """Join the process group, train, and leave it."""
    run(train, "Unfreeze a model layer by layer.", steps=200)


if __name__ == "__main__":
    main()
