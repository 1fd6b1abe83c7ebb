"""Train a small GPT on the bytes of real text, with torch's or torchddp's DistributedDataParallel."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

if not __package__:  # started by path, as torchrun does: make `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.gpt.config import DDP_CHOICES, DEVICE_CHOICES, OPTIMIZER_CHOICES, SCHEDULE_CHOICES, TrainConfig
from examples.gpt.data import load_corpus
from examples.gpt.errors import ExampleError
from examples.gpt.metrics import prepare_output, write_json
from examples.gpt.ranks import Ranks, ddp_class, environment_rank, open_ranks
from examples.gpt.trainer import Trainer

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
_DEFAULT = TrainConfig()


def _one_of(choices: tuple[str, ...]) -> str:
    return "|".join(choices)


@app.command()
def main(
    steps: Annotated[int, typer.Option(help="Optimizer steps; the schedule spans them.")] = _DEFAULT.steps,
    batch_size: Annotated[int, typer.Option(help="Windows per rank and microbatch.")] = _DEFAULT.batch_size,
    block_size: Annotated[int, typer.Option(help="Bytes per window.")] = _DEFAULT.block_size,
    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = _DEFAULT.layers,
    width: Annotated[int, typer.Option(help="Width of the residual stream.")] = _DEFAULT.width,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = _DEFAULT.heads,
    dropout: Annotated[float, typer.Option(help="Dropout probability.")] = _DEFAULT.dropout,
    optimizer: Annotated[
        str, typer.Option(metavar=_one_of(OPTIMIZER_CHOICES), help="muon: for hidden matrices; AdamW for the rest.")
    ] = _DEFAULT.optimizer,
    lr: Annotated[float, typer.Option(help="AdamW's peak learning rate.")] = _DEFAULT.lr,
    muon_lr: Annotated[float, typer.Option(help="Muon's peak learning rate.")] = _DEFAULT.muon_lr,
    schedule: Annotated[str, typer.Option(metavar=_one_of(SCHEDULE_CHOICES), help="LR schedule.")] = "cosine",
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = _DEFAULT.warmup_steps,
    seed: Annotated[int, typer.Option(help="Seed for weights, batches and dropout.")] = _DEFAULT.seed,
    eval_interval: Annotated[int, typer.Option(help="Steps between evaluations.")] = _DEFAULT.eval_interval,
    eval_batches: Annotated[int, typer.Option(help="Batches per rank and evaluation.")] = _DEFAULT.eval_batches,
    grad_accum: Annotated[int, typer.Option(help="Microbatches per step, under no_sync.")] = _DEFAULT.grad_accum,
    ddp: Annotated[
        str, typer.Option(metavar=_one_of(DDP_CHOICES), help="DDP class; 'none' trains in one process without DDP.")
    ] = _DEFAULT.ddp,
    device: Annotated[
        str, typer.Option(metavar=_one_of(DEVICE_CHOICES), help="auto: CUDA if each rank has a GPU.")
    ] = _DEFAULT.device,
    threads: Annotated[int, typer.Option(help="Torch threads per rank.")] = _DEFAULT.threads,
    data: Annotated[Path | None, typer.Option(help="Text file or folder [default: Python's source files].")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint, saved at the end.")] = None,
    save_every: Annotated[int, typer.Option(help="Steps between earlier checkpoints (0: none).")] = _DEFAULT.save_every,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from --checkpoint.")] = False,
    stop_after: Annotated[int | None, typer.Option(help="Stop after this step; the schedule stays the same.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the metrics to this file.")] = None,
    measure_comm: Annotated[
        int, typer.Option(help="Steps between measurements of exposed communication (0: never).")
    ] = _DEFAULT.measure_comm,
) -> None:
    """Train a small GPT on bytes of text, on every rank that torchrun starts, or in this process without torchrun.

    SIGTERM or SIGUSR1 to any rank stops all of them after the same step, with a checkpoint; --resume continues.

    \b
    Examples:
      torchrun --nproc-per-node 2 examples/train_gpt.py --steps 200
      torchrun --nproc-per-node 2 examples/train_gpt.py --ddp torch --json runs/torch.json
      torchrun --nproc-per-node 2 examples/train_gpt.py --optimizer muon --ddp sharded
      torchrun --nproc-per-node 2 examples/train_gpt.py --checkpoint runs/gpt.pt --save-every 50
      torchrun --nproc-per-node 2 examples/train_gpt.py --checkpoint runs/gpt.pt --resume
      python examples/train_gpt.py --ddp none --data my_notes/ --steps 500
    """
    options = dict(locals())
    try:
        train(TrainConfig(**options))
    except ExampleError as error:
        if environment_rank() == 0:  # every rank gets the same error
            typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def train(config: TrainConfig) -> None:
    """Run `config` on this rank, from joining the process group to leaving it."""
    if config.ddp != "none":
        ddp_class(config.ddp)  # fail before any wait if the class can't be imported
    torch.set_num_threads(config.threads)
    with open_ranks(config.ddp, config.device) as ranks:
        train_on(config, ranks)
        gc.collect()  # free the model's reducer before the process group that it uses


def train_on(config: TrainConfig, ranks: Ranks) -> dict[str, Any]:
    """Run `config` among `ranks` and return the record of the run (the losses are the same on every rank)."""
    with ranks.together():
        prepare_output(config.checkpoint, "--checkpoint")
        prepare_output(config.json_path, "--json")
        corpus = load_corpus(config.data, config.block_size)
    ranks.require_same(corpus.sha256, "data")
    trainer = Trainer(config, ranks, corpus)
    if config.resume:
        trainer.resume()
    record = trainer.run()
    with ranks.together():
        if ranks.rank == 0 and config.json_path is not None:
            write_json(config.json_path, record)
    return record


if __name__ == "__main__":
    app()
