"""Train the GPT of train_gpt.py, restartable by torchrun after a rank has died."""

from __future__ import annotations

import gc
import hashlib
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.distributed.elastic.multiprocessing.errors import record

if not __package__:  # started by path, as torchrun does: make `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.gpt.config import COMM_HOOK_CHOICES, TrainConfig
from examples.gpt.data import Corpus, load_corpus
from examples.gpt.errors import ExampleError
from examples.gpt.faults import FAULT_CHOICES, Fault, InjectedFaultError, Journal
from examples.gpt.metrics import prepare_output, write_json
from examples.gpt.probe import CommunicationProbe
from examples.gpt.ranks import Ranks, environment_rank, open_ranks
from examples.gpt.trainer import Trainer

EXIT_BAD_INPUT = 2
# On a busy host, ranks may join the process group many seconds apart.
GROUP_TIMEOUT = timedelta(minutes=2)
EXIT_TERMINATED = 128 + signal.SIGTERM

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
_DEFAULT = TrainConfig()


class ElasticTrainer(Trainer):
    """Exits between steps after torchrun's SIGTERM, and injects the given fault."""

    stop_signals = ()  # a rank whose peers have died must not wait for them

    def __init__(
        self,
        config: TrainConfig,
        ranks: Ranks,
        corpus: Corpus,
        *,
        timeout: timedelta,
        journal: Journal,
        fault: Fault | None,
    ) -> None:
        self._timeout = timeout
        super().__init__(config, ranks, corpus)
        self.journal = journal
        self.fault = fault
        self.step = 0
        self._asked_to_end = False
        signal.signal(signal.SIGTERM, self._note_sigterm)

    def _wrapper_options(self) -> dict[str, Any]:
        return {**super()._wrapper_options(), "timeout": self._timeout}

    def _note_sigterm(self, signum: int, frame: object) -> None:
        # Don't raise here: a rank waiting for a dead one is about to raise a more useful error.
        self._asked_to_end = True
        self.journal.note("asked to end", self.step, "SIGTERM")

    def _train_step(self, step: int, probe: CommunicationProbe) -> None:
        if self._asked_to_end:
            raise typer.Exit(EXIT_TERMINATED)
        self.step = step + 1
        if self.fault is not None:
            self.fault.strike(self.step, self.journal, self.gpt.token_embedding.weight)
        super()._train_step(step, probe)


@app.command()
def main(
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint file; training resumes from it if it exists.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 40,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints; the last step is saved too.")] = 10,
    batch_size: Annotated[int, typer.Option(help="Windows per rank and step.")] = 8,
    block_size: Annotated[int, typer.Option(help="Bytes per window.")] = 32,
    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = 2,
    width: Annotated[int, typer.Option(help="Width of the residual stream.")] = 64,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    dropout: Annotated[float, typer.Option(help="Dropout probability.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Seed for weights, batches and dropout.")] = 0,
    threads: Annotated[int, typer.Option(help="Torch threads per rank.")] = _DEFAULT.threads,
    data: Annotated[Path | None, typer.Option(help="Text file or folder [default: Python's source files].")] = None,
    comm_hook: Annotated[
        str | None, typer.Option(metavar="|".join(COMM_HOOK_CHOICES), help="Compress gradients.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Timeout of a reduction, in seconds.")] = 30.0,
    die_at: Annotated[int, typer.Option(min=0, help="Step in which a rank fails, once (0: never).")] = 0,
    die_rank: Annotated[int, typer.Option(min=0, help="The rank that fails.")] = 1,
    how: Annotated[str, typer.Option(metavar="|".join(FAULT_CHOICES), help="How it fails.")] = "kill",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write losses and a hash of the weights.")] = None,
) -> None:
    """Train a small GPT from the last checkpoint, if any: a restarted run ends with an uninterrupted run's weights.

    \b
    Examples:
      torchrun --nproc-per-node 2 --max-restarts 3 examples/train_elastic.py --checkpoint runs/elastic.pt
      torchrun --nproc-per-node 2 --max-restarts 3 examples/train_elastic.py --checkpoint runs/elastic.pt \\
          --die-at 25 --how kill
    """
    names = ("steps", "save_every", "batch_size", "block_size", "layers", "width", "heads", "dropout", "seed")
    options = {name: value for name, value in locals().items() if name in names}
    try:
        if how not in FAULT_CHOICES:
            raise ExampleError(f"unknown --how '{how}': choose one of {', '.join(FAULT_CHOICES)}")
        config = TrainConfig(
            **options,
            threads=threads,
            data=data,
            comm_hook=comm_hook,
            checkpoint=checkpoint,
            json_path=json_path,
            eval_interval=steps,
        )
        fault = Fault(die_at, die_rank, how, checkpoint.with_suffix(".fault")) if die_at else None
        train(config, timedelta(seconds=timeout), fault)
    except ExampleError as error:
        if environment_rank() == 0:  # every rank gets the same error
            typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_BAD_INPUT) from None


@record  # so that torchrun reports the error of the rank that failed first
def train(config: TrainConfig, timeout: timedelta, fault: Fault | None) -> None:
    """Run `config` on this rank, from joining the process group to leaving it."""
    assert config.checkpoint is not None
    torch.set_num_threads(config.threads)
    with open_ranks(config.ddp, config.device, GROUP_TIMEOUT) as ranks:
        with ranks.together():
            prepare_output(config.checkpoint, "--checkpoint")
            prepare_output(config.json_path, "--json")
            corpus = load_corpus(config.data, config.block_size)
        ranks.require_same(corpus.sha256, "data")
        journal = Journal(journal_path(config.checkpoint), ranks.rank)
        trainer = ElasticTrainer(config, ranks, corpus, timeout=timeout, journal=journal, fault=fault)
        if any(ranks.gather(config.checkpoint.exists())):
            trainer.resume()
        journal.note("started", trainer.first_step)
        try:
            run = trainer.run()
        except InjectedFaultError:
            raise
        except RuntimeError as error:  # also errors of communication hooks and torch's collectives
            journal.note("noticed", trainer.step, f"{type(error).__name__}: {error}")
            raise
        journal.note("finished", trainer.step)
        if ranks.rank == 0 and config.json_path is not None:
            write_json(config.json_path, {"weights_sha256": weights_digest(trainer.gpt), **run})
        del trainer
        gc.collect()  # free the model's reducer before the process group that it uses


def journal_path(checkpoint: Path) -> Path:
    """The journal of a run with this checkpoint."""
    return checkpoint.with_suffix(".events.jsonl")


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 of all parameters and buffers, bit for bit."""
    digest = hashlib.sha256()
    state: dict[str, Any] = model.state_dict()
    for name, value in sorted(state.items()):
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    app()
