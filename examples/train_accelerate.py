"""Train a small network with Accelerate and torchddp: accumulation, clipping, compressed gradients, a metric.

ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 examples/train_accelerate.py
ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 examples/train_accelerate.py --comm-hook int8 --bf16
"""

from __future__ import annotations

import argparse
import json

import accelerate
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchddp
from torchddp.integrations.accelerate import TorchDDPKwargs


def points(size: int, seed: int) -> TensorDataset:
    """Points in the plane, and whether each is inside a ring."""
    x = torch.randn(size, 2, generator=torch.Generator().manual_seed(seed))
    radius = x.square().sum(1)
    return TensorDataset(x, ((radius > 0.5) & (radius < 2.5)).long())


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    accelerate.utils.set_seed(0)
    precision = "bf16" if arguments.bf16 else "no"
    handlers = [TorchDDPKwargs(comm_hook=arguments.comm_hook)] if arguments.comm_hook else []
    if not arguments.torch_ddp:
        torchddp.install()
    accelerator = accelerate.Accelerator(
        gradient_accumulation_steps=arguments.accumulate, mixed_precision=precision, kwargs_handlers=handlers
    )
    model: nn.Module = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    training = DataLoader(points(2000, seed=1), batch_size=16, shuffle=True)
    held_back = DataLoader(points(500, seed=2), batch_size=64)
    model, optimizer, training, held_back = accelerator.prepare(model, optimizer, training, held_back)
    for epoch in range(arguments.epochs):
        model.train()
        for x, y in training:
            with accelerator.accumulate(model):  # reduces in the last microbatch of a step
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = torch.cat([accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in held_back])
        accuracy = float(right.float().mean())
        accelerator.print(f"epoch {epoch + 1}: {accuracy:.1%} of {len(right)} points are correct")
    weights = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
    result = {"accuracy": accuracy, "weights": weights, "reduced_steps": torchddp.finished_steps()}
    print(json.dumps(result), flush=True)
    accelerator.end_training()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3, help="passes over 2000 points")
    parser.add_argument("--accumulate", type=int, default=2, help="microbatches per step")
    parser.add_argument("--comm-hook", help="how gradients are compressed: fp16, bf16, int8, powersgd, ...")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--torch-ddp", action="store_true", help="use torch's class, for comparison")
    return parser.parse_args()


if __name__ == "__main__":
    main()
