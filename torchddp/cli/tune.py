"""`torchddp tune`: finds the best bucket size for a model and a group by trying sizes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from torchddp.harness import command
from torchddp.harness.plots import figure_png, finish_panel, panels
from torchddp.harness.tables import (
    bytes_text,
    counted,
    interval_text,
    number,
    origin,
    plain_table,
    ranks_text,
    ratio_sign,
    ratio_text,
)
from torchddp.harness.variants import ArgumentError

# torch and numpy load only when the command runs: `torchddp doctor` must start without them.
if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from torchddp.cli.tune_run import TuneResult

HELP = f"""Try bucket sizes on a model, and print which argument of DistributedDataParallel to use.

Records a profile of the step, plans buckets from it, and times the default, the plan and each size in turn on one
model. Saves the best buckets, which bucket_cap_mb="auto" then uses for this model, number of ranks and transport. If
the steps are too noisy to tell which buckets are best, it says so, saves nothing, and exits with status
{command.EXIT_UNSURE}.

{command.FACTORY_HELP}

\b
Examples:
  torchddp tune --model train.py:make
      your model, on two ranks of this machine
  torchddp tune --model gpt --caps 1,5,25 --seconds 60
      these sizes, and more rounds
  torchddp tune --model gpt --profile gpt.json --no-keep
      write a profile for `torchddp simulate`, but save no plan
  torchddp tune --plot tune.png --json tune.json
      save a plot and the numbers
  torchrun --nproc-per-node 4 -m torchddp tune --model train.py:make
      on ranks that torchrun started, on one host or several
"""


def tune(
    context: typer.Context,
    model: command.ModelName = "mlp",
    world_size: command.WorldSize = None,
    caps: Annotated[
        str | None, typer.Option(metavar="MIB,...", help="Sizes in MiB. [default: 0.25,0.5,1,2,5,10,25,50,100]")
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time for the timed rounds; at least 7 rounds are run.")
    ] = 30.0,
    transport: command.TransportName = "auto",
    find_unused_parameters: command.FindUnusedParameters = False,
    keep: Annotated[bool, typer.Option(help='Save the best buckets for bucket_cap_mb="auto".')] = True,
    profile_path: Annotated[
        Path | None, command.output_option("Write a profile for `torchddp simulate` to this file.", "--profile")
    ] = None,
    json_path: command.JsonFile = None,
    plot: Annotated[Path | None, command.output_option("Plot step time over bucket size to this PNG file.")] = None,
) -> None:
    from torchddp.cli.tune_run import DEFAULT_CAPS_MB, TuneSettings, tune_document, tune_on_rank

    command.check_numbers(seconds, None)
    command.check_plots("--plot", plot)
    settings = TuneSettings(
        model=model,
        world_size=command.check_world_size(world_size, "to tune"),
        transport=transport,
        find_unused_parameters=find_unused_parameters,
        caps_mb=DEFAULT_CAPS_MB if caps is None else command.parse_caps(caps),
        seconds=seconds,
    )
    console = command.rank_console()
    result: TuneResult | None = command.run_command(
        context, tune_on_rank, settings, console, lambda done, total: "timing bucket sizes", json_path
    )
    if result is None:
        return
    found = tune_document(result)
    document = command.document_of(context, settings, results=[found])
    document["verdict"] = answer(found, document["machine"])
    console.print(tune_table(found))
    for line in notes(found):
        console.print(f"\n{line}", style="dim")
    console.print(f"\n{document['verdict']}", style="bold")
    console.print(next(origin(document)))
    command.write_outputs(
        console,
        document,
        json_path,
        (profile_path, result.profile.save),
        (plot, lambda path: path.write_bytes(figure_png(draw_curve(found)))),
    )
    if found["in_doubt"] is not None:
        raise typer.Exit(command.EXIT_UNSURE)
    if keep:
        console.print(f'saved for bucket_cap_mb="auto": {_keep(result, found)}', soft_wrap=True)
    else:
        console.print('Not saved: bucket_cap_mb="auto" measures for itself, and may choose others.', soft_wrap=True)


def _keep(result: TuneResult, document: dict[str, Any]) -> Path:
    from torchddp.plan.plan_cache import PlanCacheError, PlanKey, save_plan

    profile = result.profile
    index = next(i for i, row in enumerate(document["candidates"]) if row["chosen"])
    key = PlanKey(profile.fingerprint, profile.world_size, profile.ranks_per_host, profile.transport, profile.backend)
    measured = {name: document[name] for name in ("model", "rounds", "threads", "compute_ms", "cost")}
    try:
        save_plan(key.path, result.candidates[index].buckets, key, measured)
    except PlanCacheError as error:
        raise ArgumentError(f"{error} Or save no plan, with --no-keep.") from error
    except OSError as error:
        raise ArgumentError(f"Cannot save the plan as '{key.path}': {error.strerror}; see --no-keep.") from error
    return key.path


# --- the report, which needs only the document, so a saved one gives the same ---

NOTE = (
    "A step is forward and backward of the slowest rank; a ratio is taken in each round. faster, slower: the 95% "
    "interval (CI) of the ratio's median lies below or above 1. unclear: it includes 1. same: the default's own "
    "buckets. Sizes that produce the same buckets as a smaller size are omitted. If several are statistically tied for "
    "fastest, the first is chosen, if it saves at least {least_gain:.0%} of the step. Expected: the prediction from "
    "the measured times of gradients and messages."
)
# If expected and measured times differ by more, the report comments on it.
OFF = 0.15


def title(result: dict[str, Any]) -> str:
    return (
        f"{result['model']}: {counted(result['parameters'], 'gradient')}, {bytes_text(result['gradient_bytes'])}, "
        f"{ranks_text(result['world_size'])} of {counted(result['threads'], 'thread')} over {result['transport']}"
    )


def measured_text(result: dict[str, Any]) -> str:
    cost = result["cost"]
    return (
        f"In the profile, a step without messages takes {number(result['compute_ms'])} ms, and a message "
        f"{number(cost['alpha_us'])} us plus {number(cost['beta_ns_per_byte'])} ns per byte, give or take "
        f"{cost['misfit']:.0%}."
    )


def expectation_text(result: dict[str, Any]) -> str:
    """An explanation if expected and measured times differ; empty if they agree."""
    off = {row["name"]: row["step_ms"]["median"] / row["predicted_ms"] - 1 for row in result["candidates"]}
    name = max(off, key=lambda each: abs(off[each]))
    if abs(off[name]) <= OFF:
        return ""
    if all(share > OFF for share in off.values()):
        why = "other programs may have used the processors since the profile, as all steps were slower than its own"
    elif all(share < -OFF for share in off.values()):
        why = "other programs may have used the processors during the profile, as all steps were faster than its own"
    else:
        why = "the planner's model misses something here"
    differs = f"takes {abs(off[name]):.0%} {'more' if off[name] > 0 else 'less'} time than expected"
    return f"A step with the {name} buckets {differs}: {why}. Go by the measured times."


def notes(result: dict[str, Any]) -> list[str]:
    profile = () if result["in_doubt"] is not None else (expectation_text(result), measured_text(result))
    return [text for text in (*profile, NOTE.format(**result)) if text]


def answer(result: dict[str, Any], machine: dict[str, Any]) -> str:
    rounds = counted(result["rounds"], "round")
    if result["in_doubt"] is not None:
        row = next(row for row in result["candidates"] if row["name"] == result["in_doubt"])
        ratio = row["ratio_to_default"]
        more = min(command.MAX_SECONDS, 10 * math.ceil(max(30, 2 * result["seconds"]) / 10))
        load, cores = machine["load_average_1min"], counted(machine["cores"], "core")
        busy = (
            f"Stop other programs (the load was {load:g} on {cores}) and try" if load > machine["cores"] / 2 else "Try"
        )
        return (
            f"Too noisy to tell after {rounds}, so no plan is saved: {row['argument']} takes {ratio['median']:.2f} of "
            f"the default's step, {interval_text(ratio)}. {busy} --seconds {more}."
        )
    chosen = next(row for row in result["candidates"] if row["chosen"])
    if chosen["argument"]:
        gain = 1 - chosen["ratio_to_default"]["median"]
        return (
            f"Use DistributedDataParallel(model, {chosen['argument']}): {gain:.1%} less time per step than the default."
        )
    least = f"{result['least_gain']:.0%}"
    return f"Leave bucket_cap_mb out: after {rounds} no size saves at least {least} of the default's step."


def mark(row: dict[str, Any]) -> str:
    if row["chosen"]:
        return "<- use" if row["argument"] else "<- keep"
    ratio = row["ratio_to_default"]
    if ratio is None:
        return "same" if row["same_buckets"] else ""
    return {-1: "faster", 0: "unclear", 1: "slower"}[ratio_sign(ratio)]


def tune_table(result: dict[str, Any]) -> Table:
    columns = ("buckets", "step p50\nms", "step\np90", "expected\nms", "vs. default\np50 [95% CI]")
    table = plain_table(f"{title(result)}, {counted(result['rounds'], 'round')}", "buckets by", *columns)
    table.add_column("", no_wrap=True)
    for row in result["candidates"]:
        table.add_row(
            row["name"],
            str(row["buckets"]),
            number(row["step_ms"]["median"]),
            number(row["step_ms"]["p90"]),
            number(row["predicted_ms"]),
            ratio_text(row["ratio_to_default"], without="1"),
            mark(row),
            style="bold" if row["chosen"] else "",
        )
    return table


def draw_curve(result: dict[str, Any]) -> Figure:
    import numpy as np

    figure, ((axis,),) = panels(1, 1, 7.5, 4.2)
    sized = [row for row in result["candidates"] if row["cap_mb"] is not None]
    caps = [row["cap_mb"] for row in sized]
    low, medians, high = np.array([[row["step_ms"][key] for key in ("q25", "median", "q75")] for row in sized]).T
    spread = [medians - low, high - medians]
    axis.errorbar(caps, medians, yerr=spread, fmt="o", capsize=2, color="#4c6ef5", label="measured (p25..p75)")
    expected = [row["predicted_ms"] for row in sized]
    axis.plot(caps, expected, linestyle=":", marker=".", color="#9aa5b1", label="expected")
    for name, color in (("default", "#495057"), ("planned", "#d9480f")):
        row = next(row for row in result["candidates"] if row["name"] == name)
        label = f"{name}, {counted(row['buckets'], 'bucket')}"
        axis.axhline(row["step_ms"]["median"], color=color, linestyle="--", label=label)
    axis.axhline(result["compute_ms"], color="#2b8a3e", linewidth=1, label="computation alone")
    axis.set_xscale("log")
    axis.set_xticks(caps, [f"{cap:g}" for cap in caps])
    axis.minorticks_off()
    doubt = "" if result["in_doubt"] is None else "\ntoo noisy to tell which is best"
    finish_panel(axis, f"{title(result)}{doubt}", "bucket_cap_mb, MiB", "step, ms")
    axis.legend(fontsize=8, frameon=False)
    return figure
