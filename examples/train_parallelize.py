"""One training loop for every parallelism: DDP, sharded, FSDP2 or HSDP, chosen by a file or the command line.

python -m examples.train_parallelize
torchrun --nproc-per-node 2 -m examples.train_parallelize --use-fsdp --sharding-strategy=SHARD_GRAD_OP
torchrun --nproc-per-node 2 -m examples.train_parallelize --config examples/parallelize.toml
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import torch

if not __package__:  # started by path: make `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.gpt.ranks import Ranks, environment_rank, open_ranks
from examples.small import loss_of, make_model, report
from torchddp import ParallelConfig, finished_steps, parallel_group_info, parallelize

EXIT_BAD_INPUT = 2


def train(ranks: Ranks, config: ParallelConfig, steps: int, lr: float) -> None:
    """Train on this rank. Only the first line depends on the parallelism."""
    model, optimizer = parallelize(make_model(), config, optimizer=functools.partial(torch.optim.AdamW, lr=lr))
    info = parallel_group_info(model)
    for step in range(steps):
        loss = loss_of(model, ranks.rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(ranks, step, steps, loss)
    if ranks.rank == 0:
        print(f"{type(model).__name__}, {info.dp.world_size} data parallel x {info.mp.world_size} model parallel")
        print(f"steps reduced by torchddp: {finished_steps()}")


def main() -> None:
    """Read the configuration, join the process group, train, and leave it."""
    parser = argparse.ArgumentParser(
        description="Train with the parallelism that the arguments choose.",
        epilog="All other arguments are torchddp.ParallelConfig's (docs/parallelize.md): --kind sharded, --use-fsdp, "
        "--sharding-strategy=HYBRID_SHARD, --model-parallel=2, ddp.bucket_cap_mb=4.",
    )
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps [%(default)s]")
    parser.add_argument("--lr", type=float, default=3e-3, help="AdamW's learning rate [%(default)s]")
    parser.add_argument("--config", type=Path, help="TOML, YAML or JSON file; arguments take precedence")
    arguments, others = parser.parse_known_args()
    torch.set_num_threads(1)
    try:
        config = ParallelConfig() if arguments.config is None else ParallelConfig.from_file(arguments.config)
        config = ParallelConfig.from_cli(others, base=config)
    except (OSError, TypeError, ValueError) as error:
        if environment_rank() == 0:  # every rank gets the same error
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(EXIT_BAD_INPUT) from None
    with open_ranks("torchddp", "cpu") as ranks:
        train(ranks, config, arguments.steps, arguments.lr)


if __name__ == "__main__":
    main()
