"""Train a classifier of points on the CPU with Composer's Trainer and torchddp's DistributedDataParallel.

    composer -n 2 examples/train_composer.py
    torchrun --nproc-per-node 2 examples/train_composer.py --strategy forced_sync --microbatch 4

`--ddp torch` trains the same model with torch's class. Needs mosaicml.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchddp
from torchddp.integrations import require

POINTS = 256
CLASSES = 4


def points() -> TensorDataset:
    """Four clouds of points in the plane, always the same."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(POINTS) % CLASSES
    centers = torch.tensor([[2.0, 0.0], [0.0, 2.0], [-2.0, 0.0], [0.0, -2.0]])
    return TensorDataset(centers[labels] + torch.randn(POINTS, 2, generator=generator) / 2, labels)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ddp", choices=["torchddp", "torch"], default="torchddp")
    strategies = [strategy.value for strategy in torchddp.sync.DDPSyncStrategy]
    parser.add_argument("--strategy", choices=strategies, default="single_auto_sync")
    parser.add_argument("--batch", type=int, default=16, help="samples per rank and step")
    parser.add_argument("--microbatch", type=int, default=16, help="samples per rank and microbatch")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save", help="file for the weights, written by rank 0")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    composer = require("composer", "composer")
    torch.set_num_threads(1)
    if args.ddp == "torchddp":
        from torchddp.integrations.composer import enable

        enable()
    composer.utils.dist.initialize_dist("cpu")

    class Classifier(composer.ComposerModel):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, batch: list[Tensor]) -> Tensor:
            return self.net(batch[0])

        def loss(self, outputs: Tensor, batch: list[Tensor]) -> Tensor:
            return nn.functional.cross_entropy(outputs, batch[1])

    data = points()
    sampler = composer.utils.dist.get_sampler(data, shuffle=True)
    model = Classifier()
    trainer = composer.Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=args.batch, sampler=sampler),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        max_duration=f"{args.epochs}ep",
        device="cpu",
        device_train_microbatch_size=args.microbatch,
        ddp_sync_strategy=args.strategy,
        seed=17,
        progress_bar=False,
        auto_log_hparams=False,
    )
    trainer.fit()
    wrapped = trainer.state.model
    with torch.no_grad():
        right = (model.net(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean().item()
    if composer.utils.dist.get_global_rank() == 0:
        steps = torchddp.finished_steps()
        print(f"{type(wrapped).__module__}: {right:.0%} right, {args.epochs} epochs; torchddp reduced {steps} steps")
        if args.save:
            torch.save(model.net.state_dict(), args.save)
    trainer.close()


if __name__ == "__main__":
    main()
