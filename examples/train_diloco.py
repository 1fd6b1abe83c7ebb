"""Train with few synchronizations: ranks train independently and average their models every few steps (DiLoCo).

torchrun --nproc-per-node 2 -m examples.train_diloco --sync-every 20 --wire int8
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Literal, get_args

import torch

if not __package__:  # started by path: make `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.gpt.ranks import Ranks, open_ranks
from examples.small import loss_of, make_model, report
from torchddp.averaging import DiLoCo

Wire = Literal["fp32", "bf16", "fp16", "int8", "int4"]
WIRES = get_args(Wire)


def train(ranks: Ranks, steps: int, lr: float, sync_every: int, wire: Wire) -> None:
    """Train on this rank. The model isn't wrapped, because gradients are not averaged."""
    model = make_model()
    optimizer = DiLoCo(model, torch.optim.AdamW(model.parameters(), lr=lr), sync_every=sync_every, wire=wire)
    sent_bytes = 0
    for step in range(steps):
        loss = loss_of(model, ranks.rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % sync_every == 0:
            sent_bytes += optimizer.traffic.wire_bytes or 0  # None: the transport doesn't count bytes
        report(ranks, step, steps, loss)
    if ranks.rank == 0:
        each_step = 4 * sum(p.numel() for p in model.parameters())
        print(f"bytes sent by this rank in {steps} steps: {sent_bytes} (gradients would take {each_step} per step)")
        print(f"synchronizations by torchddp: {steps // sync_every}")


def main() -> None:
    """Join the process group, train, and leave it."""
    parser = argparse.ArgumentParser(description="DiLoCo on a small model.")
    parser.add_argument("--steps", type=int, default=100, help="inner steps of each rank [%(default)s]")
    parser.add_argument("--lr", type=float, default=3e-3, help="the inner AdamW's learning rate [%(default)s]")
    parser.add_argument("--sync-every", type=int, default=20, help="inner steps between averages [%(default)s]")
    parser.add_argument(
        "--wire", choices=WIRES, default="int8", help="format in which outer gradients are sent [%(default)s]"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with open_ranks("torchddp", "cpu") as ranks:
        train(ranks, arguments.steps, arguments.lr, arguments.sync_every, arguments.wire)


if __name__ == "__main__":
    main()
