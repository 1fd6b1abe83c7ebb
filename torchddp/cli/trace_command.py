"""`torchddp trace`: one step of a model, in detail, over all ranks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from torchddp.harness.tables import ranks_text
from torchddp.harness.variants import ArgumentError

# torch and numpy load only when the command runs: `torchddp doctor` must start without them.
if TYPE_CHECKING:
    from torchddp.cli.trace_run import Traced, TraceSettings

HELP = """Record some steps of a model on several ranks, and show the median one: in Perfetto and as text.

For each bucket: when its first and last gradient were ready, when it was packed, launched and done, which rank was last
and which parameter held it back. What was exposed, the overlap ratio, and the straggler by name.

\b
Examples:
  torchddp trace
      an MLP on two ranks of this machine; open trace.json at https://ui.perfetto.dev
  torchddp trace --model mypackage.training:make --world-size 4 --steps 50
      your model: a function that returns (module, batch) or (module, batch, loss)
  torchddp trace --model gpt --bucket-cap-mb 5 --plot step.png --html step.html
      other buckets, with a picture and a page to hand on
  torchrun --nproc-per-node 2 -m torchddp trace --model gpt
      on the ranks that torchrun started, also of several hosts
"""


def check_settings(
    model: str, world_size: int | None, steps: int, bucket_cap_mb: float | None, plan: Path | None, transport: str
) -> TraceSettings:
    """What can be said before any rank starts."""
    check_loads()
    from torchddp.cli.trace_run import TraceSettings

    check_model(model)
    if not 1 <= steps <= 10_000:
        raise ArgumentError(f"--steps wants 1 to 10000, not {steps}.")
    if bucket_cap_mb is not None and not 0 < bucket_cap_mb < float("inf"):
        raise ArgumentError(f"--bucket-cap-mb wants a positive number of MiB, not {bucket_cap_mb:g}.")
    if plan is not None and bucket_cap_mb is not None:
        raise ArgumentError("--plan has the buckets: leave --bucket-cap-mb out.")
    check_transport(transport)
    path = None if plan is None else str(plan)
    return TraceSettings(model, check_world_size(world_size, "to trace"), steps, bucket_cap_mb, path, transport)


def run_trace(settings: TraceSettings, console: Console) -> Traced | None:
    """What the ranks found; None on those of torchrun's that are not to speak."""
    from torchddp.cli.trace_run import trace_rank

    traced: Traced | None = run_command(
        "trace", trace_rank, settings, console, lambda done, total: f"step {done:.0f} of {total:.0f}"
    )
    return traced


def trace(
    context: typer.Context,
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "mlp",
    world_size: Annotated[int | None, typer.Option(help="Number of ranks. [default: 2, or torchrun's]")] = None,
    steps: Annotated[int, typer.Option(help="How many steps to record, after some to warm up.")] = 20,
    out: Annotated[Path, typer.Option(help="Where the trace of the median step goes.")] = Path("trace.json"),
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the report as JSON to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write report and picture as one page to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the picture, a PNG, to this file.")] = None,
    bucket_cap_mb: Annotated[float | None, typer.Option(help="As of the constructor. [default: its own]")] = None,
    plan: Annotated[Path | None, typer.Option(help="Buckets that `torchddp tune` kept, by their file.")] = None,
    transport: Annotated[str, typer.Option(help="As of the constructor: auto, c10d, shm or nccl.")] = "auto",
) -> None:
    for path, option in ((out, "--out"), (json_path, "--json"), (html, "--html"), (plot, "--plot")):
        check_output(path, option, folder=False)
    settings = check_settings(model, world_size, steps, bucket_cap_mb, plan, transport)
    console = rank_console()
    traced = run_trace(settings, console)
    if traced is not None:
        _deliver(settings, traced, context.obj["command"], console, out, json_path, html, plot)


def _deliver(
    settings: TraceSettings,
    traced: Traced,
    command: str,
    console: Console,
    out: Path,
    json_path: Path | None,
    html: Path | None,
    plot: Path | None,
) -> None:
    """Print the report and write the files."""
    from torchddp.harness.machine import new_document
    from torchddp.profiler.chrome import write_chrome_trace
    from torchddp.profiler.report import merged_dict, merged_report, sent_lines
    from torchddp.profiler.session import merged_trace

    profile = traced.profile
    step = profile.median_step()
    document = new_document(command, asdict(settings))
    document["results"] = [
        {"transport": traced.transport, "device": traced.device, **merged_dict(profile, step)},
    ]
    title = f"{settings.model}, {ranks_text(settings.world_size)}, {traced.device}, transport {traced.transport}"
    console.print(f"{title}\n", markup=False, emoji=False)  # a factory's path may look like either
    console.print(merged_report(profile))
    write_chrome_trace(out, merged_trace(profile, only_step=step.index))
    console.print(f"\nwrote {out}: open it at https://ui.perfetto.dev")
    if json_path is not None:
        json_path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    if html is not None or plot is not None:
        from torchddp.cli.trace_page import write_trace_page
        from torchddp.harness.plots import figure_png
        from torchddp.profiler.picture import draw

        below = "; ".join(sent_lines(profile.records))
        ranks = [record.rank for record in profile.records]
        png = figure_png(draw(step, ranks, f"{title}: step {step.index}\n{below}"))
        if plot is not None:
            plot.write_bytes(png)
        if html is not None:
            write_trace_page(html, f"torchddp trace: {title}", profile, step, png, document)
    for path in (json_path, html, plot):
        if path is not None:
            console.print(f"wrote {path}")
