"""The command line of `torchddp bench`, which `python -m benchmarks` has too."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from torchddp.bench.cases import DEFAULT_CASES, Settings
from torchddp.harness import command, model_names
from torchddp.harness.launch import LaunchError, started_by_torchrun
from torchddp.harness.variants import TORCHDDP, ArgumentError, load_class

HELP = f"""Compare the speed of DistributedDataParallel classes, which take turns step by step in one launch.

Gradients are checked before anything is timed. Absolute times drift between runs, so quote ratios from a single run,
with the 95% intervals of their medians. A ratio is colored if its interval excludes 1. Ranks run on the CPU, over
gloo. The table shows torchddp, and torch with its best options; --developer shows all options, and how they are
measured.

{command.FACTORY_HELP}

\b
Cases:
  step_time   a training step: forward, backward, SGD
  exposed     what a class adds to a step
  memory      the peak memory of a step
  per_param   the cost per parameter, on one rank

\b
Examples:
  torchddp bench
      step_time, exposed and memory, about two minutes
  torchddp bench --quick
      the same in under a minute, to check that it works
  torchddp bench --case step_time --model train.py:make
      your own model
  torchddp bench --model gpt2 --seconds 120 --out results
      many rounds of GPT-2 small; save a plot and the numbers
  torchddp bench --case exposed --vs mypackage.MyDDP
      your class next to torchddp's and torch's
  torchddp bench --ours torch.nn.parallel.DistributedDataParallel
      torch against itself, which shows the noise
  torchddp bench --case all --json result.json --out results
      everything, about five minutes

\b
In a checkout, `python -m benchmarks` has more cases, for developers.
"""

CASE_HELP = f"One of the cases above, or all; repeatable. [default: {', '.join(DEFAULT_CASES)}]"
MODEL_HELP = f"{model_names.MODEL_HELP}; repeatable. [default: by case]"
SECONDS_HELP = "Seconds of timed rounds for each model. [default: 15 to 45, by case; 2 with --quick]"
WORLD_SIZE_HELP = "Number of ranks. [default: 1 for per_param, otherwise 2]"
CAPS_HELP = (
    "bucket_cap_mb of torch's tuned rows, one row per value (memory always uses 25). "
    "[default: 1,5,25,100 for step_time, per_param and exposed, otherwise 25]"
)


def _case_names() -> list[str]:
    from torchddp.bench.registry import ALL, CASES

    return [*CASES, ALL]


def benchmark(
    context: typer.Context,
    case: Annotated[list[str] | None, typer.Option(metavar="CASE", autocompletion=_case_names, help=CASE_HELP)] = None,
    model: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", autocompletion=command.model_names, help=MODEL_HELP)
    ] = None,
    seconds: Annotated[float | None, typer.Option(metavar="SECONDS", help=SECONDS_HELP)] = None,
    world_size: Annotated[int | None, typer.Option(metavar="N", help=WORLD_SIZE_HELP)] = None,
    caps: Annotated[str | None, typer.Option(metavar="MIB,...", help=CAPS_HELP)] = None,
    ours: Annotated[str, typer.Option(metavar="CLASS", help="The class under test, as a dotted path.")] = TORCHDDP,
    vs: Annotated[
        list[str] | None, typer.Option(metavar="CLASS", help="Another class to time, as a dotted path; repeatable.")
    ] = None,
    ours_tuned: Annotated[
        bool, typer.Option("--ours-tuned", help="Also time the class under test with torch's tuned options.")
    ] = False,
    find_unused_parameters: command.FindUnusedParameters = False,
    quick: Annotated[bool, typer.Option("--quick", help="A smoke test under 60 s. Do not quote its numbers.")] = False,
    developer: Annotated[
        bool, typer.Option("--developer", help="Show every variant, the 90th percentiles, and how they are measured.")
    ] = False,
    seed: Annotated[
        int, typer.Option(metavar="N", max=2**63 - 1, help="Seed for weights, data and the order of steps.")
    ] = 0,
    options: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", hidden=True)] = None,
    json_path: command.JsonFile = None,
    out: Annotated[
        Path | None,
        command.output_option("Write <date>-<case>-<machine>.json and a .png plot to this folder.", folder=True),
    ] = None,
) -> None:
    command.check_loads()
    if started_by_torchrun() and os.environ["WORLD_SIZE"] != "1":  # all would measure at once
        raise ArgumentError("This command starts its own ranks (--world-size): run it without torchrun or srun.")
    # Imported here so that the help needs neither torch nor numpy.
    from torchddp.bench.registry import check_names, parse_options
    from torchddp.bench.report import save_results

    models = tuple(dict.fromkeys(model or ()))
    cases = check_names(case or (), models)
    command.check_numbers(seconds, world_size)
    command.check_plots("--out", out)
    settings = Settings(
        cases=cases,
        models=models,
        seconds=seconds,
        world_size=world_size,
        caps_mb=command.parse_caps(caps) if caps is not None else None,
        ours=ours,
        peers=tuple(vs or ()),
        ours_tuned=ours_tuned,
        quick=quick,
        seed=seed,
        find_unused_parameters=find_unused_parameters,
        options=parse_options(cases, options or ()),
    )
    console = command.make_console()
    # `python -m benchmarks`, which is no subcommand, is the developers'.
    document = run(settings, context.obj["command"], console, json_path, developer or context.parent is None)
    try:
        command.write_outputs(console, document, json_path, (out, lambda path: save_results(document, path)))
    except ArgumentError as error:
        raise ArgumentError("; ".join([*document["failures"], str(error)])) from None
    if document["failures"]:
        raise LaunchError("; ".join(document["failures"]))


def run(
    settings: Settings, command_line: str, console: Console, json_path: Path | None = None, developer: bool = True
) -> dict[str, Any]:
    """Run the cases and print the report. The file gets each result at once; a failed case doesn't stop the others."""
    from torchddp.bench.registry import CASES
    from torchddp.bench.report import render, verdict
    from torchddp.harness.machine import new_document, write_json
    from torchddp.harness.models import find_factory

    cases = [CASES[name] for name in settings.cases]
    if any(case.models for case in cases):  # report a missing class or factory before the first launch
        for path in (settings.ours, *settings.peers):
            load_class(path)
        for model in filter(lambda name: ":" in name, settings.models):
            find_factory(model)
    document = new_document("bench", command_line, asdict(settings))
    with command.progress_bar(console) as progress:
        display = command.Display(progress)
        for case in cases:
            try:
                for result in case.run(case, settings, display):
                    document["results"].append(result)
                    if json_path is not None:
                        with contextlib.suppress(OSError):  # the report comes first, and then the error
                            write_json(json_path, document)
            except LaunchError as error:
                document["failures"].append(str(error))
    if document["results"]:
        document["verdict"] = verdict(document)
        console.print(render(document, developer=developer))
    return document
