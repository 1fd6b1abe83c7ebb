"""`torchddp tune`: the bucket sizes for a model and a group, by trying them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from torchddp.cli.rank_options import (
    MODEL_HELP,
    check_loads,
    check_model,
    check_transport,
    check_world_size,
    rank_console,
    run_command,
)
from torchddp.harness.command import check_output
from torchddp.harness.variants import ArgumentError

# torch and numpy load only when the command runs: `torchddp doctor` must start without them.
if TYPE_CHECKING:
    from torchddp.plan.sweep import TuneResult, TuneSettings

HELP = """Try bucket sizes and the planned buckets on a model and its group, and say which argument to use.

Records a profile of the step, times every size and the plan interleaved on one model, shows the curve, and keeps the
best buckets for the model, world size and transport: bucket_cap_mb="auto" finds them there.

\b
Examples:
  torchddp tune --model mypackage.training:make
      your model on two ranks of this machine: a function that returns (module, batch) or (module, batch, loss)
  torchrun --nnodes 2 --nproc-per-node 4 ... -m torchddp tune --model mypackage.training:make
      on the very group it will train on
  torchddp tune --model gpt --caps 1,5,25 --seconds 60
      these sizes, and more rounds
  torchddp tune --model gpt --profile gpt.json --no-keep && torchddp simulate gpt.json
      record the profile for what-if questions; leave the kept plans alone
  torchddp tune --plot curve.png --html tune.html --json tune.json
      for people and for machines
"""


def check_settings(
    model: str, world_size: int | None, caps: str | None, seconds: float, transport: str
) -> TuneSettings:
    """What can be said before any rank starts."""
    check_loads()
    from torchddp.harness.command import check_numbers, parse_caps
    from torchddp.plan.candidates import DEFAULT_CAPS_MB
    from torchddp.plan.sweep import TuneSettings

    check_numbers(seconds, world_size)
    return TuneSettings(
        model=check_model(model),
        transport=check_transport(transport),
        caps_mb=DEFAULT_CAPS_MB if caps is None else parse_caps(caps),
        seconds=seconds,
        world_size=check_world_size(world_size, "to tune"),
    )


def run_tune(settings: TuneSettings, console: Console) -> TuneResult | None:
    """What the ranks found; None on those of torchrun's that are not to speak."""
    from torchddp.plan.sweep import tune_on_rank

    result: TuneResult | None = run_command("tune", tune_on_rank, settings, console, lambda done, total: "trying")
    return result


def tune(
    context: typer.Context,
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "mlp",
    world_size: Annotated[int | None, typer.Option(help="Number of ranks. [default: 2, or torchrun's]")] = None,
    caps: Annotated[str | None, typer.Option(help="Sizes to try, MiB. [default: 0.25,0.5,1,2,5,10,25,50,100]")] = None,
    seconds: Annotated[float, typer.Option(help="Time for the timed rounds; there are five at least.")] = 30.0,
    transport: Annotated[str, typer.Option(help="As of the constructor: auto, c10d, shm or nccl.")] = "auto",
    keep: Annotated[bool, typer.Option(help='Keep the best buckets for bucket_cap_mb="auto".')] = True,
    profile_path: Annotated[
        Path | None, typer.Option("--profile", help="Write the step's profile, for `torchddp simulate`, to this file.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as one page to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the curve, a PNG, to this file.")] = None,
) -> None:
    outputs = ((profile_path, "--profile"), (json_path, "--json"), (html, "--html"), (plot, "--plot"))
    for path, option in outputs:
        check_output(path, option, folder=False)
    settings = check_settings(model, world_size, caps, seconds, transport)
    console = rank_console()
    result = run_tune(settings, console)
    if result is None:
        return
    document = _document(settings, result, context.obj["command"])
    _show(document["results"][0], console)
    _write(result, document, profile_path, json_path, html, plot)
    for path, _ in outputs:
        if path is not None:
            console.print(f"wrote {path}", soft_wrap=True, highlight=False)
    if keep:
        console.print(f"kept in {_keep(result, document['results'][0])}", soft_wrap=True, highlight=False)


def _document(settings: TuneSettings, result: TuneResult, command: str) -> dict[str, Any]:
    from torchddp.harness.machine import new_document
    from torchddp.plan.tune_result import tune_document

    return {**new_document(command, asdict(settings)), "results": [tune_document(result)]}


def _show(result: dict[str, Any], console: Console) -> None:
    from torchddp.plan.tune_report import NOTE, answer, measured_lines, tune_table

    console.print(tune_table(result))
    for line in (*measured_lines(result), NOTE):
        console.print(f"\n{line}", style="dim", markup=False, highlight=False)
    console.print(f"\n{answer(result)}", style="bold", markup=False, highlight=False, soft_wrap=True)


def _keep(result: TuneResult, document: dict[str, Any]) -> Path:
    from torchddp.plan.plan_cache import PlanCacheError, PlanKey, save_plan

    profile = result.profile
    index = next(i for i, row in enumerate(document["candidates"]) if row["chosen"])
    key = PlanKey(profile.fingerprint, profile.world_size, profile.ranks_per_host, profile.transport, profile.backend)
    measured = {name: document[name] for name in ("model", "rounds", "threads", "compute_ms", "cost")}
    try:
        save_plan(key.path, result.candidates[index].buckets, key, measured)
    except PlanCacheError as error:
        raise ArgumentError(f"{error} --no-keep goes without.") from error
    except OSError as error:
        raise ArgumentError(f"Cannot keep the plan in '{key.path}': {error.strerror}; --no-keep leaves it.") from error
    return key.path


def _write(
    result: TuneResult,
    document: dict[str, Any],
    profile_path: Path | None,
    json_path: Path | None,
    html: Path | None,
    plot: Path | None,
) -> None:
    from torchddp.harness.machine import origin
    from torchddp.harness.page import write_page
    from torchddp.harness.plots import figure_png
    from torchddp.plan.tune_report import draw_curve, page_sections, title

    found = document["results"][0]
    if profile_path is not None:
        result.profile.save(profile_path)
    if json_path is not None:
        json_path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    if plot is not None:
        plot.write_bytes(figure_png(draw_curve(found)))
    if html is not None:
        lines = [line.plain for line in origin(document)]
        write_page(html, f"torchddp tune: {title(found)}", page_sections(found), lines, data=document)
