"""Train the same GPT with torch's and with torchddp's DistributedDataParallel, and compare the two.

python -m examples.demo            # about two minutes on two cores
python -m examples.demo --quick    # under a minute
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

if not __package__:  # started by path: make `examples` importable
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.gpt.comparison import compare_losses, merge_segments, plot_losses, result_table, verdict
from examples.gpt.errors import ExampleError
from examples.gpt.metrics import prepare_output, write_json
from examples.gpt.processes import torchrun
from examples.gpt.ranks import ddp_class

CLASSES = ("torch", "torchddp")
RANKS = 2
ROOT = Path(__file__).resolve().parents[1]
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
MAX_TABLE_COLUMNS = 80

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@dataclass(frozen=True)
class Segment:
    """One launch: `ddp` trains from where its previous segment ended to step `stop_after`."""

    ddp: str
    stop_after: int
    resume: bool


@dataclass(frozen=True)
class Plan:
    """How long to train, and in which launches."""

    steps: int
    batch_size: int
    eval_interval: int
    measure_comm: int
    segments: tuple[Segment, ...]


def make_plan(classes: Sequence[str], *, quick: bool) -> Plan:
    """One launch per class if `quick`, otherwise two, in the order A B B A so that drift affects both equally."""
    first, second = classes
    if quick:
        steps = 50
        return Plan(steps, 8, 25, 3, tuple(Segment(ddp, steps, False) for ddp in classes))
    steps = 100
    order = ((first, 1), (second, 1), (second, 2), (first, 2))
    return Plan(steps, 16, 25, 3, tuple(Segment(ddp, steps * half // 2, half == 2) for ddp, half in order))


def run_segment(plan: Plan, number: int, seed: int, folder: Path, timeout_seconds: float, console: Console) -> Any:
    """Launch one segment and return its record."""
    segment = plan.segments[number]
    metrics = folder / f"{number}.json"
    arguments = ["--ddp", segment.ddp, "--device", "cpu", "--seed", str(seed), "--steps", str(plan.steps)]
    arguments += ["--stop-after", str(segment.stop_after), "--eval-interval", str(plan.eval_interval)]
    arguments += ["--batch-size", str(plan.batch_size)]
    arguments += ["--measure-comm", str(plan.measure_comm), "--json", str(metrics)]
    arguments += ["--checkpoint", str(folder / f"{segment.ddp}.pt"), *(["--resume"] if segment.resume else [])]
    console.print(f"[bold]Launch {number + 1} of {len(plan.segments)}: {segment.ddp}, {RANKS} ranks[/bold]")
    console.file.flush()
    try:
        torchrun(
            ROOT / "examples" / "train_gpt.py",
            arguments,
            ranks=RANKS,
            timeout_seconds=timeout_seconds,
            output=console.file,
        )
    except ExampleError as error:
        raise ExampleError(f"--ddp {segment.ddp}: {error}") from error
    return json.loads(metrics.read_text())


def run_demo(
    classes: Sequence[str], *, quick: bool, seed: int, out: Path | None, timeout_seconds: float, console: Console
) -> dict[str, Any]:
    """Train with both classes, print the table, and return the result; write it and the plot to ``out``, if given."""
    started = time.monotonic()
    written = [] if out is None else [out / "loss.png", out / "result.json"]
    for path in written:
        prepare_output(path, "--out")
        path.unlink(missing_ok=True)  # so that a failed run doesn't leave an old result behind
    for name in classes:
        ddp_class(name)  # fail before the first minute of training, not after it
    plan = make_plan(classes, quick=quick)
    with tempfile.TemporaryDirectory(prefix="torchddp-demo-") as folder:
        parts = [
            (segment.ddp, run_segment(plan, number, seed, Path(folder), timeout_seconds, console))
            for number, segment in enumerate(plan.segments)
        ]
    records = {name: merge_segments([part for ddp, part in parts if ddp == name]) for name in classes}
    comparison = compare_losses(*records.values())
    facts = next(iter(records.values()))
    title = f"GPT with {facts['parameters'] / 1e6:.1f} M parameters, {RANKS} ranks on CPU, {plan.steps} steps"
    result = {
        "command": "python -m examples.demo" + (" --quick" if quick else ""),
        "seed": seed,
        "ranks": RANKS,
        "losses": comparison.as_json(),
        "classes": records,
        "written": list(map(str, written)),
        "wall_seconds": time.monotonic() - started,
    }
    if written:
        plot_losses(records, written[0], title)
        write_json(written[1], result)
    console.print()
    console.print(result_table(records, title), width=min(console.width, MAX_TABLE_COLUMNS))
    console.print(verdict(records, comparison), highlight=False)
    if written:
        console.print(f"Wrote {written[0]} and {written[1]}", highlight=False, soft_wrap=True)
    return result


@app.command()
def main(
    quick: Annotated[bool, typer.Option("--quick", help="A shorter run, under a minute.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed for both runs.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write loss.png and result.json to this folder.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Timeout of each launch, in seconds.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the result, as JSON, to stdout.")] = False,
) -> None:
    """Train one GPT with torch's DDP and with torchddp's from the same seed, and compare losses and costs.

    \b
    Examples:
      python -m examples.demo
      python -m examples.demo --quick --json > result.json
    """
    signal.signal(signal.SIGTERM, _raise_interrupt)  # ends the child processes too
    console = Console(file=sys.stderr if as_json else sys.stdout)
    try:
        result = run_demo(CLASSES, quick=quick, seed=seed, out=out, timeout_seconds=timeout, console=console)
    except ExampleError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        typer.echo("interrupted; the training processes have ended", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    if not result["losses"]["equal"]:
        typer.echo(f"error: the losses of {' and '.join(CLASSES)} differ", err=True)
        raise typer.Exit(EXIT_FAILED)


def _raise_interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    app()
