"""The command line of `python -m benchmarks.chaos`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.chaos import plan
from benchmarks.chaos.run import Settings, run
from torchddp.bench.report import write_document
from torchddp.harness.command import EXIT_FAILED, check_output, make_console, run_app
from torchddp.harness.variants import ArgumentError

HELP = """Inject faults into small training jobs, at random ranks, steps and phases, and check how the others react.

Each trial is a job of two to four ranks with one fault. It passes if every rank that depends on the faulty one
raises an error in time that names the right rank, no rank hangs, nothing is left behind, and all gradients were
correct until then.
Faults: kill (SIGKILL), stop (SIGSTOP), exception, slow (a pause shorter than every timeout: the job continues),
socket (connections shut down), full (no room for shared memory: the job continues without it). The kinds corrupt and
orphan are deliberate errors that check the judge: their trials must fail.

\b
Examples:
  python -m benchmarks.chaos
      300 trials, about ten minutes
  python -m benchmarks.chaos --trials 20 --kinds kill,stop --over shm
      a selection
  python -m benchmarks.chaos --only 17
      rerun one of the 300
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def parse_names(text: str, option: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """'kill,stop' -> ('kill', 'stop'), without duplicates; raises `ArgumentError` for an unknown name."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = next((name for name in names if name not in allowed), None)
    if unknown is not None or not names:
        raise ArgumentError(
            f"{option} must be some of {', '.join(allowed)}, separated by commas, not '{unknown or text}'."
        )
    return names


@app.command(help=HELP)
def chaos(
    context: typer.Context,
    trials: Annotated[int, typer.Option(help="Number of trials.")] = 300,
    seed: Annotated[int, typer.Option(help="Seed for ranks, steps, phases and options.")] = 1,
    kinds: Annotated[str, typer.Option(help="Faults to inject, separated by commas.")] = ",".join(plan.KINDS),
    over: Annotated[str, typer.Option(help="Transports, separated by commas.")] = ",".join(plan.OVER),
    world_sizes: Annotated[str, typer.Option(help="World sizes, separated by commas.")] = "2,3,4",
    only: Annotated[int | None, typer.Option(help="Run only the trial with this number.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
) -> int:
    if trials < 1:
        raise ArgumentError(f"--trials must be a positive number, not {trials}.")
    if only is not None and not 0 <= only < trials:
        raise ArgumentError(f"--only must be a trial's number, 0 to {trials - 1}, not {only}.")
    check_output(json_path, "--json", folder=False)
    sizes = parse_names(world_sizes, "--world-sizes", [str(size) for size in plan.WORLD_SIZES])
    settings = Settings(
        trials=trials,
        seed=seed,
        kinds=parse_names(kinds, "--kinds", (*plan.KINDS, *plan.MUTANTS)),
        over=parse_names(over, "--over", plan.OVER),
        world_sizes=tuple(map(int, sizes)),
        only=only,
    )
    console = make_console()
    document = run(settings, context.obj["command"], console)
    write_document(document, json_path, None, console)
    return 0 if all(row["passed"] for row in document["results"]) else EXIT_FAILED


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code: 1 if a trial failed."""
    return run_app(app, "python -m benchmarks.chaos", arguments)
