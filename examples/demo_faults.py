"""Kill a rank during training, let torchrun restart it, and compare the result with an uninterrupted run.

python -m examples.demo_faults            # under two minutes on two cores
python -m examples.demo_faults --how stop # the rank hangs: torchrun kills it after 30 s
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

if not __package__:  # started by path: make `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.gpt.errors import ExampleError
from examples.gpt.faults import FAULT_CHOICES, Event, read_journal
from examples.gpt.metrics import prepare_output, write_json
from examples.gpt.processes import processes_with, torchrun
from examples.train_elastic import journal_path

RANKS = 2
ROOT = Path(__file__).resolve().parents[1]
RUN_VARIABLE = "TORCHDDP_EXAMPLE_RUN"
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
MAX_TABLE_COLUMNS = 100
# Descriptions of the faults, for the table.
_WORDS = {"none": "nothing", "kill": "kill -9", "exception": "an exception", "stop": "SIGSTOP"}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@dataclass(frozen=True)
class Plan:
    """How long to train, when to save, and the step in which rank 1 fails."""

    steps: int = 40
    save_every: int = 10
    die_at: int = 25
    timeout_s: float = 10.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run.

    `noticed_by` is the rank that raised TransportError, `noticed_s` the seconds from the fault to that error,
    `resumed_from` the step of the checkpoint that training resumed from, `back_s` the seconds from the fault to that.
    """

    fault: str
    restarts: int
    noticed_by: int | None
    noticed_s: float | None
    error: str
    resumed_from: int | None
    back_s: float | None
    final_loss: float
    weights_sha256: str
    weights_equal: bool
    leftovers: tuple[str, ...]
    wall_s: float

    @property
    def ok(self) -> bool:
        noticed = self.fault == "none" or (self.noticed_by is not None and self.restarts > 0)
        return noticed and self.weights_equal and not self.leftovers


def outcome_of(
    fault: str, events: Sequence[Event], result: dict[str, Any], wanted: str, leftovers: Sequence[str], wall_s: float
) -> Outcome:
    """Build it from a run's journal and rank 0's result; `wanted` is the expected digest ("": any)."""
    struck = next((event for event in events if event.kind == "fault"), None)
    noticed = next((event for event in events if event.kind == "noticed"), None)
    again = next((event for event in events if event.kind == "started" and event.attempt > 0), None)
    digest = result["weights_sha256"]
    return Outcome(
        fault=fault,
        restarts=max(event.attempt for event in events),
        noticed_by=noticed.rank if noticed else None,
        noticed_s=noticed.time_s - struck.time_s if noticed and struck else None,
        error=noticed.text if noticed else "",
        resumed_from=again.step if again else None,
        back_s=again.time_s - struck.time_s if again and struck else None,
        final_loss=result["summary"]["final_train_loss"],
        weights_sha256=digest,
        weights_equal=digest == (wanted or digest),
        leftovers=tuple(leftovers),
        wall_s=wall_s,
    )


def run_one(fault: str, plan: Plan, seed: int, wanted: str, folder: Path, timeout_s: float, output: IO[str]) -> Outcome:
    """Train to the last step under one torchrun; raises ExampleError if that fails."""
    checkpoint, result_path = folder / f"{fault}.pt", folder / f"{fault}.json"
    arguments = ["--checkpoint", str(checkpoint), "--json", str(result_path), "--seed", str(seed)]
    arguments += ["--steps", str(plan.steps), "--save-every", str(plan.save_every), "--timeout", str(plan.timeout_s)]
    if fault != "none":
        arguments += ["--die-at", str(plan.die_at), "--die-rank", "1", "--how", fault]
    mark = uuid.uuid4().hex
    began = time.monotonic()
    try:
        torchrun(
            ROOT / "examples" / "train_elastic.py",
            arguments,
            ranks=RANKS,
            timeout_seconds=timeout_s,
            output=output,
            errors=output,
            max_restarts=3,
            environment={RUN_VARIABLE: mark},
        )
    except ExampleError as error:
        raise ExampleError(f"{_WORDS[fault]}: {error}") from error
    wall_s = time.monotonic() - began
    leftovers = [f"process {pid}: {name}" for pid, name in processes_with(RUN_VARIABLE, mark)]
    result = json.loads(result_path.read_text())
    return outcome_of(fault, read_journal(journal_path(checkpoint)), result, wanted, leftovers, wall_s)


def run_demo(
    faults: Sequence[str], plan: Plan, *, seed: int, out: Path, timeout_s: float, console: Console
) -> dict[str, Any]:
    """Train without a fault and with each fault, print the table, write the result file, and return the result."""
    result_path = out / "faults.json"
    prepare_output(result_path, "--out")
    result_path.unlink(missing_ok=True)  # so that a failed run doesn't leave an old result behind
    before = _shared_memory_files()
    outcomes: list[Outcome] = []
    log_path = out / "faults.log"
    with tempfile.TemporaryDirectory(prefix="faults-", dir=out) as folder, log_path.open("w") as log:
        for fault in ("none", *faults):
            console.print(f"[bold]{RANKS} ranks, {plan.steps} steps; fault on rank 1: {_WORDS[fault]}[/bold]")
            wanted = outcomes[0].weights_sha256 if outcomes else ""
            try:
                outcomes.append(run_one(fault, plan, seed, wanted, Path(folder), timeout_s, log))
            except ExampleError as error:
                raise ExampleError(f"{error} (log: {log_path})") from error
    segments = sorted(_shared_memory_files() - before)
    result = {
        "command": "python -m examples.demo_faults",
        "ranks": RANKS,
        "seed": seed,
        "plan": asdict(plan),
        "runs": [{**asdict(outcome), "ok": outcome.ok} for outcome in outcomes],
        "segments_left": segments,
        "ok": all(outcome.ok for outcome in outcomes) and not segments,
    }
    write_json(result_path, result)
    console.print()
    console.print(result_table(outcomes, plan), width=min(console.width, MAX_TABLE_COLUMNS))
    for outcome in outcomes[1:]:
        first = outcome.error.partition("\n")[0] or "the other rank was ended before it could say why"
        console.print(f"{_WORDS[outcome.fault]}: {first}", highlight=False, markup=False, soft_wrap=True)
    console.print(_closing_words(outcomes, segments), highlight=False)
    console.print(f"All figures: {result_path}\ntorchrun's log: {log_path}", highlight=False, soft_wrap=True)
    return result


def result_table(outcomes: Sequence[Outcome], plan: Plan) -> Table:
    """The faults, when and by which rank each was noticed, and how each run ended."""
    title = f"Rank 1 fails in step {plan.die_at} of {plan.steps}; a checkpoint every {plan.save_every} steps"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1))
    table.add_column("what\nhappens", no_wrap=True)
    for heading in (
        *("noticed\nby rank", "after\ns", "re-\nstarts", "resumed\nfrom step", "trains again\nafter s"),
        *("final\nloss", "weights\nthe same"),
    ):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        table.add_row(
            _WORDS[outcome.fault],
            _number(outcome.noticed_by, 0),
            _number(outcome.noticed_s, 2),
            str(outcome.restarts),
            _number(outcome.resumed_from, 0),
            _number(outcome.back_s, 1),
            f"{outcome.final_loss:.4f}",
            "-" if outcome.fault == "none" else "yes" if outcome.weights_equal else "NO",
        )
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _closing_words(outcomes: Sequence[Outcome], segments: Sequence[str]) -> str:
    left = [*(text for outcome in outcomes for text in outcome.leftovers), *segments]
    return f"LEFT BEHIND: {', '.join(left)}" if left else "No processes or files in /dev/shm were left behind."


def _shared_memory_files() -> set[str]:
    """This user's files in /dev/shm with torchddp in their names; torchddp should create none there."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return set()
    return {str(p) for p in folder.iterdir() if "torchddp" in p.name and p.lstat().st_uid == os.getuid()}


@app.command()
def main(
    how: Annotated[
        list[str] | None,
        typer.Option(metavar="|".join(FAULT_CHOICES), help="Fault to inject; repeatable [default: kill, exception]."),
    ] = None,
    steps: Annotated[int, typer.Option(min=4, help="Optimizer steps; the fault occurs after 5/8 of them.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Seed for all runs.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for faults.json and faults.log.")] = ROOT / "runs" / "faults",
    timeout: Annotated[float, typer.Option(min=1, help="Timeout of each run, in seconds.")] = 180.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the result, as JSON, to stdout.")] = False,
) -> None:
    """Train without a fault, then with faults that torchrun recovers from, and compare the final weights.

    \b
    Examples:
      python -m examples.demo_faults
      python -m examples.demo_faults --how kill --json > result.json
    """
    signal.signal(signal.SIGTERM, _raise_interrupt)  # ends the child processes too
    console = Console(file=sys.stderr if as_json else sys.stdout)
    faults = how or ["kill", "exception"]
    plan = Plan(steps, max(1, steps // 4), steps * 5 // 8)
    try:
        if unknown := [fault for fault in faults if fault not in FAULT_CHOICES]:
            raise ExampleError(f"unknown --how '{unknown[0]}': choose one of {', '.join(FAULT_CHOICES)}")
        result = run_demo(faults, plan, seed=seed, out=out, timeout_s=timeout, console=console)
    except ExampleError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        typer.echo("interrupted; the training processes have ended", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    if not result["ok"]:
        typer.echo("error: a run did not recover as expected; see the table", err=True)
        raise typer.Exit(EXIT_FAILED)


def _raise_interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    app()
