"""The command line of `python -m benchmarks`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from torchddp.bench.cases import CASES
from torchddp.bench.collective.operations import OPERATIONS
from torchddp.bench.command import check_output, make_console, run_app, write_document
from torchddp.bench.run import Settings, run
from torchddp.bench.variants import DEFAULT_CAPS_MB, TORCHDDP, ArgumentError

HELP = """Time DistributedDataParallel classes against each other in one launch, interleaved step by step.

Absolute times drift between runs, the ratios of one run do not: quote those, with their spread.

\b
Examples:
  python -m benchmarks
      every case, about six minutes
  python -m benchmarks --quick
      the same in under a minute, to see that it works
  python -m benchmarks --case exposed --model gpt --seconds 120
      one table, many rounds
  python -m benchmarks --case exposed --vs mypackage.MyDDP
      another class beside ours and torch's
  python -m benchmarks --op all_reduce --op broadcast --world-size 4
      no DDP: single collectives over message sizes, gloo and our transports
  python -m benchmarks --ours torch.nn.parallel.DistributedDataParallel
      torch against itself: what the harness shows when nothing differs
  python -m benchmarks --json result.json --out benchmarks/results
      keep the numbers, and a plot of each case
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def parse_caps(text: str) -> tuple[float, ...]:
    """'1,5,25' -> (1.0, 5.0, 25.0)."""
    try:
        caps = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ArgumentError(f"--caps wants numbers of MiB with commas, like 1,5,25,100, not '{text}'.") from None
    if not all(0 < cap < float("inf") for cap in caps):
        raise ArgumentError(f"--caps wants positive numbers of MiB, not '{text}'.")
    return tuple(dict.fromkeys(caps))


def check_names(cases: Sequence[str], models: Sequence[str]) -> tuple[str, ...]:
    """The cases to run; an unknown case, or a model none of them has, is an `ArgumentError`."""
    for case in cases:
        if case not in CASES:
            raise ArgumentError(f"There is no case '{case}'; choose from {', '.join(CASES)}.")
    chosen = tuple(dict.fromkeys(cases)) or tuple(CASES)
    allowed = tuple(dict.fromkeys(model for case in chosen for model in CASES[case].models))
    if models and not allowed:
        raise ArgumentError(f"--model: the case {', '.join(chosen)} has no models.")
    for model in models:
        if model not in allowed:
            raise ArgumentError(f"No model '{model}' in {', '.join(chosen)}; choose from {', '.join(allowed)}.")
    # With --model and no --case, only the cases that have such a model.
    return tuple(case for case in chosen if not models or set(models) & set(CASES[case].models))


def check_operations(
    cases: Sequence[str], models: Sequence[str], operations: Sequence[str]
) -> tuple[Sequence[str], tuple[str, ...]]:
    """The cases asked for and the collectives to time; with --op alone, that case alone."""
    for operation in operations:
        if operation not in OPERATIONS:
            raise ArgumentError(f"There is no collective '{operation}'; choose from {', '.join(OPERATIONS)}.")
    if operations and not cases and not models:
        cases = ("collective",)
    if operations and "collective" not in cases:
        raise ArgumentError("--op is of the case collective, which was not asked for.")
    return cases, tuple(dict.fromkeys(operations)) or ("all_reduce",)


def check_numbers(seconds: float | None, world_size: int | None) -> None:
    """Ranges that no run can do without."""
    if seconds is not None and not 0 < seconds <= 3600:
        raise ArgumentError(f"--seconds wants a number above 0 and up to 3600, not {seconds:g}.")
    if world_size is not None and not 1 <= world_size <= 64:
        raise ArgumentError(f"--world-size wants 1 to 64 ranks, not {world_size}.")


@app.command(help=HELP)
def benchmark(
    context: typer.Context,
    case: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(CASES)}; repeatable.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="One of small, mlp, gpt, conv; repeatable. [default: all of the case]")
    ] = None,
    op: Annotated[
        list[str] | None,
        typer.Option(help=f"Of collective: one of {', '.join(OPERATIONS)}; repeatable. [default: all_reduce]"),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Time for the timed rounds of each model or collective. [default: 45, with --quick 2]"),
    ] = None,
    world_size: Annotated[int | None, typer.Option(help="Number of ranks. [default: 1 for per_param, else 2]")] = None,
    caps: Annotated[
        str | None,
        typer.Option(help="bucket_cap_mb values of the tuned rows. [default: 1,5,25,100, with --quick 1,25]"),
    ] = None,
    ours: Annotated[str, typer.Option(help="The class under test, as a dotted path.")] = TORCHDDP,
    vs: Annotated[
        list[str] | None, typer.Option(help="Another class beside them, as a dotted path; repeatable.")
    ] = None,
    ours_tuned: Annotated[bool, typer.Option("--ours-tuned", help="Also ours with torch's tuned options.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Under 60 s: a smoke test, not to be quoted.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights, data and the order of the steps.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write <date>-<case>-<machine>.json and a .png plot into this folder.")
    ] = None,
) -> None:
    models = tuple(model or ())
    asked, operations = check_operations(case or (), models, op or ())
    cases = check_names(asked, models)
    check_numbers(seconds, world_size)
    check_output(json_path, "--json", folder=False)
    check_output(out, "--out", folder=True)
    settings = Settings(
        cases=cases,
        models=models,
        operations=operations,
        seconds=seconds if seconds is not None else (2.0 if quick else 45.0),
        world_size=world_size,
        caps_mb=parse_caps(caps) if caps is not None else ((1, 25) if quick else DEFAULT_CAPS_MB),
        ours=ours,
        peers=tuple(vs or ()),
        ours_tuned=ours_tuned,
        quick=quick,
        seed=seed,
    )
    console = make_console()
    write_document(run(settings, context.obj["command"], console), json_path, out, console)


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit code. A user's mistake is one sentence and exit code 2."""
    return run_app(app, "python -m benchmarks", arguments)
