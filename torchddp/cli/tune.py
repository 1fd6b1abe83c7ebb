"""`torchddp tune`: the bucket sizes for a model and a group, by trying them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from torchddp.cli import options
from torchddp.harness.command import check_numbers, output_option, parse_caps
from torchddp.harness.page import PagePlot, Section, page_table, write_page
from torchddp.harness.plots import figure_png, finish_panel, panels
from torchddp.harness.tables import MB, number, plain_table, ranks_text, ratio_text
from torchddp.harness.variants import ArgumentError

# torch and numpy load only when the command runs: `torchddp doctor` must start without them.
if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from torchddp.cli.tune_run import TuneResult

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


def tune(
    context: typer.Context,
    model: options.Model = "mlp",
    world_size: options.WorldSize = None,
    caps: Annotated[str | None, typer.Option(help="Sizes to try, MiB. [default: 0.25,0.5,1,2,5,10,25,50,100]")] = None,
    seconds: Annotated[float, typer.Option(help="Time for the timed rounds; there are seven at least.")] = 30.0,
    transport: options.Transport = "auto",
    keep: Annotated[bool, typer.Option(help='Keep the best buckets for bucket_cap_mb="auto".')] = True,
    profile_path: Annotated[
        Path | None, output_option("Write the step's profile, for `torchddp simulate`, to this file.", "--profile")
    ] = None,
    json_path: options.JsonFile = None,
    html: Annotated[Path | None, output_option("Write the report as one page to this file.")] = None,
    plot: Annotated[Path | None, output_option("Write the curve, a PNG, to this file.")] = None,
) -> None:
    from torchddp.cli.tune_run import DEFAULT_CAPS_MB, TuneSettings, tune_document, tune_on_rank
    from torchddp.harness.machine import new_document, origin, write_json

    check_numbers(seconds, None)
    caps_mb = DEFAULT_CAPS_MB if caps is None else parse_caps(caps)
    settings = TuneSettings(model, transport, caps_mb, seconds, options.check_world_size(world_size, "to tune"))
    console = options.rank_console()
    result: TuneResult | None = options.run_command(
        "tune", tune_on_rank, settings, console, lambda done, total: "trying"
    )
    if result is None:
        return
    found = tune_document(result)
    document = {**new_document(context.obj["command"], asdict(settings)), "results": [found]}
    console.print(tune_table(found))
    for line in (measured_text(found), NOTE):
        console.print(f"\n{line}", style="dim", markup=False, highlight=False)
    console.print(f"\n{answer(found)}", style="bold", markup=False, highlight=False, soft_wrap=True)
    name, lines = f"torchddp tune: {title(found)}", [line.plain for line in origin(document)]
    options.write_outputs(
        console,
        (profile_path, result.profile.save),
        (json_path, lambda path: write_json(path, document)),
        (html, lambda path: write_page(path, name, page_sections(found), lines, document)),
        (plot, lambda path: path.write_bytes(figure_png(draw_curve(found)))),
    )
    if keep:
        console.print(f"kept in {_keep(result, found)}", soft_wrap=True, highlight=False)


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


# --- what is shown, all from the document: a saved one gives the same ---

NOTE = (
    "A step is forward and backward of the slowest rank; ratios are per round. Expected: what the planner's model says "
    "from the measured times of gradients and messages. Marked: the choice, which is the fastest, or one that no "
    "measurement tells from it."
)


def title(result: dict[str, Any]) -> str:
    return (
        f"{result['model']}: {result['parameters']} gradients, {result['gradient_bytes'] / MB:.3g} MB, "
        f"{ranks_text(result['world_size'])} x {result['threads']} over {result['transport']}"
    )


def measured_text(result: dict[str, Any]) -> str:
    cost = result["cost"]
    return (
        f"Computation alone takes {number(result['compute_ms'])} ms. A message takes {number(cost['alpha_us'])} us and "
        f"{number(cost['beta_ns_per_byte'])} ns a byte (the line misses its points by {cost['misfit']:.0%})."
    )


def answer(result: dict[str, Any]) -> str:
    chosen = next(row for row in result["candidates"] if row["chosen"])
    if not chosen["argument"]:
        return "Leave bucket_cap_mb out: nothing measured is faster than the default."
    ratio = chosen["ratio_to_default"]["median"]
    gain = f" ({1 - ratio:.0%} less time a step than the default)" if ratio and ratio < 0.995 else ""
    return f"DistributedDataParallel(model, {chosen['argument']}){gain}"


def tune_table(result: dict[str, Any]) -> Table:
    columns = ("buckets", "step p50\nms", "step\np90", "expected\nms", "to the default\np50 [p25..p75]")
    table = plain_table(f"{title(result)}, {result['rounds']} rounds", "buckets by", *columns)
    for row in result["candidates"]:
        table.add_row(
            row["name"],
            str(row["buckets"]),
            number(row["step_ms"]["median"]),
            number(row["step_ms"]["p90"]),
            number(row["predicted_ms"]),
            ratio_text(row["ratio_to_default"], without="1"),
            style="bold" if row["chosen"] else "",
        )
    return table


def draw_curve(result: dict[str, Any]) -> Figure:
    """Step time over bucket size, measured and expected; the default and the planned buckets as lines across."""
    figure, ((axis,),) = panels(1, 1, 7.5, 4.2)
    sized = [row for row in result["candidates"] if row["cap_mb"] is not None]
    caps = [row["cap_mb"] for row in sized]
    medians = [row["step_ms"]["median"] for row in sized]
    spread = [
        [row["step_ms"]["median"] - row["step_ms"]["q25"] for row in sized],
        [row["step_ms"]["q75"] - row["step_ms"]["median"] for row in sized],
    ]
    axis.errorbar(caps, medians, yerr=spread, marker="o", capsize=2, color="#4c6ef5", label="measured (p25..p75)")
    expected = [row["predicted_ms"] for row in sized]
    axis.plot(caps, expected, linestyle=":", marker=".", color="#9aa5b1", label="expected")
    for name, color in (("default", "#495057"), ("planned", "#d9480f")):
        row = next(row for row in result["candidates"] if row["name"] == name)
        axis.axhline(row["step_ms"]["median"], color=color, linestyle="--", label=f"{name}, {row['buckets']} buckets")
    axis.axhline(result["compute_ms"], color="#2b8a3e", linewidth=1, label="computation alone")
    axis.set_xscale("log")
    axis.set_xticks(caps, [f"{cap:g}" for cap in caps])
    axis.minorticks_off()
    finish_panel(axis, title(result), "bucket_cap_mb, MiB", "step, ms")
    axis.legend(fontsize=8, frameon=False)
    return figure


def page_sections(result: dict[str, Any]) -> list[Section]:
    curve = PagePlot(figure_png(draw_curve(result)), "Step time over bucket size, measured and expected")
    return [
        Section("What to use", [answer(result), measured_text(result)]),
        Section("Step time by bucket size", [curve, page_table(tune_table(result)), NOTE]),
    ]
