"""The case `training`: loss, bytes and seconds of training with each method, on one host or behind a slow link.

A small GPT on Python's source files, and a perceptron on scikit-learn's digits. All methods start from the same
weights, see the same data in the same order and take turns in one launch, so that the machine's drift affects all
alike. The emulated hosts need root and the programs ip and tc.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from benchmarks.hosts import parse_place, place_at, place_text
from benchmarks.options import one_of, several, whole_number
from benchmarks.training.curves import Point, arrival
from benchmarks.training.methods import METHODS
from benchmarks.training.race import REFERENCE, race, racers_of
from benchmarks.training.tasks import TASKS, Task, shortened
from torchddp.bench.cases import BenchCase, Job, Option, Result, Settings
from torchddp.harness.command import Display
from torchddp.harness.launch import Report
from torchddp.harness.plots import finish_panel, panels
from torchddp.harness.stats import summarize
from torchddp.harness.tables import number, plain_table, ranks_text
from torchddp.harness.variants import ArgumentError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUICK_STEPS = 100
OPTIONS = {
    "place": Option(None, parse_place, "host, or the rate of a link between two hosts, such as 100mbit."),
    "tasks": Option(
        (), several(one_of(TASKS)), f"Some of {', '.join(TASKS)}. [default: gpt,digits; with a link wide-gpt]"
    ),
    "methods": Option(tuple(METHODS), several(one_of(METHODS)), f"Some of {', '.join(METHODS)}."),
    "steps": Option(0, whole_number(3, 10_000), "Steps of torch-ddp. [default: by task]", quick=QUICK_STEPS),
    "seeds": Option(1, whole_number(1, 20), "Runs of each method, with different weights and batches. [default: 1]"),
}


# --- on a rank -------------------------------------------------------------------------------------------------------


def task_of(job: Job, name: str) -> Task:
    steps = job.options["steps"]
    return shortened(TASKS[name](), steps) if steps else TASKS[name]()


def measure(job: Job, name: str, report: Report) -> dict[str, Any]:
    """One task: a race of all methods for each seed. The same on every rank."""
    task, seeds = task_of(job, name), job.options["seeds"]
    races = []
    for seed in range(job.seed, job.seed + seeds):

        def progress(done: float, total: float, seed: int = seed) -> None:
            report(seed - job.seed + done / total, seeds)

        over_link = job.options["place"] is not None
        with racers_of(job.options["methods"], task, seed, job.collective_timeout_s, over_link=over_link) as racers:
            target = race(racers, progress)
            races.append({"target": target, "methods": {racer.name: racer.result() for racer in racers}})
    return {
        "task": task.name,
        "title": task.title,
        "unit": task.unit,
        "units_per_step": task.batch_size * task.sample_units * job.world_size,
        "steps": task.steps,
        "parameters": sum(parameter.numel() for parameter in task.make_model(0).parameters()),
        "races": races,
    }


# --- results ---------------------------------------------------------------------------------------------------------


def run(case: BenchCase, settings: Settings, display: Display) -> list[Result]:
    job = settings.job_of(case)
    rate = job.options["place"]
    tasks = job.options["tasks"] or (("gpt", "digits") if rate is None else ("wide-gpt",))
    if "digits" in tasks and importlib.util.find_spec("sklearn") is None:
        raise ArgumentError("The task digits needs scikit-learn: pip install scikit-learn, or --set tasks=gpt.")
    if rate is not None and job.world_size % 2:
        raise ArgumentError(f"--world-size must be even for two hosts, not {job.world_size}.")
    methods = tuple(name for name in METHODS if name == REFERENCE or name in job.options["methods"])
    job = replace(job, models=tasks, options={**job.options, "methods": methods}, collective_timeout_s=240.0)
    display.start(case.name)
    with place_at(rate, job.world_size) as place:
        raws = case.launch(job, display, place)
    return [task_result(raw, job.world_size, rate) for raw in raws]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def final_loss(raw: dict[str, Any], steps: int) -> float:
    loss: float = next(loss for done, _, loss in raw["points"] if done >= steps)
    return loss


def first_error(raws: Sequence[dict[str, Any]]) -> str | None:
    """The first error among a method's runs, a loss that is not finite included."""
    for raw in raws:
        if "error" in raw:
            return str(raw["error"])
        if not all(math.isfinite(loss) for *_, loss in raw["points"]):
            return "the loss is not finite"
    return None


def method_row(name: str, raw: dict[str, Any]) -> dict[str, Any]:
    """One method, averaged over its runs. `arrival` is None if a run did not reach its target."""
    runs = [one["methods"][name] for one in raw["races"]]
    row: dict[str, Any] = {"name": name, "what": METHODS[name].what, "bound": METHODS[name].bound}
    if (error := first_error(runs)) is not None:
        return {**row, "error": error}
    losses = [final_loss(each, raw["steps"]) for each in runs]
    theirs = [final_loss(one["methods"][REFERENCE], raw["steps"]) for one in raw["races"]]
    ratios = [loss / their for loss, their in zip(losses, theirs, strict=True)]
    arrivals = [
        arrival([Point(*point) for point in each["points"]], one["target"])
        for each, one in zip(runs, raw["races"], strict=True)
    ]
    found = [each for each in arrivals if each is not None]
    sent = [each["bytes_per_step"] for each in runs if each["bytes_per_step"] is not None]
    return {
        **row,
        "loss": mean(losses),
        "ratio": {"mean": mean(ratios), "low": min(ratios), "high": max(ratios)},
        "arrival": dict(zip(("steps", "seconds"), map(mean, zip(*found, strict=True)), strict=True))
        if len(found) == len(runs)
        else None,
        "step_s": summarize([seconds for each in runs for seconds in each["step_seconds"]]),
        "bytes_per_step": mean(sent) if len(sent) == len(runs) else None,
        "points": runs[0]["points"],
    }


def task_result(raw: dict[str, Any], world_size: int, rate: int | None) -> Result:
    """A row for each method; `speedup`: the seconds to the loss of torch's class over the method's."""
    rows = [method_row(name, raw) for name in raw["races"][0]["methods"]]
    seconds = {row["name"]: row["arrival"]["seconds"] for row in rows if row.get("arrival")}
    torchs = [seconds[name] for name in (REFERENCE, "torch-ddp-5") if name in seconds]
    for row in rows:
        row["speedup"] = min(torchs) / seconds[row["name"]] if torchs and row["name"] in seconds else None
    return {
        "case": "training",
        **{key: value for key, value in raw.items() if key != "races"},
        "world_size": world_size,
        "place": place_text(rate),
        "seeds": len(raw["races"]),
        "target": mean([one["target"] for one in raw["races"]]),
        "methods": rows,
    }


# --- table and plot --------------------------------------------------------------------------------------------------


def bytes_text(count: float | None) -> str:
    """'12.6 MB', '840 B'; '?' if unknown."""
    if count is None:
        return "?"
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{number(count / size)} {unit}"
    return f"{count:.0f} B"


def ratio_cell(row: dict[str, Any]) -> Text:
    """Green within the method's bound, red beyond it."""
    ratio, bound = row["ratio"], row["bound"]
    style = "" if bound is None else "green" if ratio["mean"] <= bound else "red"
    return Text(f"{ratio['mean']:.3f} [{ratio['low']:.3f}..{ratio['high']:.3f}]", style=style)


def cells(row: dict[str, Any]) -> list[str | Text]:
    if "error" in row:
        return ["", Text("failed", style="red")]
    reached = "" if row["arrival"] is None else number(row["arrival"]["seconds"])
    speedup = "" if row["speedup"] is None else f"{row['speedup']:.2f}"
    bound = "" if row["bound"] is None else f"{row['bound']:g}"
    times = [number(row["step_s"]["median"]), reached, speedup]
    return [bytes_text(row["bytes_per_step"]), ratio_cell(row), bound, *times]


def table(result: Result) -> Table:
    seeds = f"{result['seeds']} seed{'s' if result['seeds'] > 1 else ''}"
    title = (
        f"{result['title']}: {result['parameters']:,} parameters, {ranks_text(result['world_size'])}, "
        f"{result['place']}, {result['steps']} steps of {result['units_per_step']:,} {result['unit']}, {seeds}, "
        f"to loss {result['target']:.3f}"
    )
    times = ("s a\nstep", "s to\nloss", "speed-\nup")
    columns = ("sent\na step", "loss / torch's\nmean [low..high]", "bound", *times)
    errors = [f"{row['name']}: {row['error']}" for row in result["methods"] if "error" in row]
    found = plain_table(title, "method", *columns, notes=errors)
    for row in result["methods"]:
        found.add_row(row["name"], *cells(row))
    return found


def draw(results: Sequence[Result]) -> Figure:
    """Loss by steps and by seconds: a row of panels per task."""
    from matplotlib import pyplot

    figure, axes = panels(len(results), 2, 11.0, 4.2 * len(results))
    colors = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for row, result in zip(axes, results, strict=True):
        ran = [method for method in result["methods"] if "points" in method]
        for axis, place, label in zip(row, (0, 1), ("steps", "seconds of training"), strict=True):
            for color, method in zip(colors, ran, strict=False):
                trained = method["points"][1:]
                style = "--" if method["name"].startswith("torch-") else "-"
                xs, losses = [point[place] for point in trained], [point[2] for point in trained]
                axis.plot(xs, losses, style, marker="o", markersize=2, linewidth=1, color=color, label=method["name"])
            axis.axhline(result["target"], color="#868e96", linewidth=1)
            finish_panel(axis, f"{result['title']}, {result['place']}", label, "held-out loss")
        row[1].set_xscale("log")
        row[0].legend(fontsize=7, frameon=False)
    return figure


CASE = BenchCase(
    name="training",
    title="loss, and seconds to a loss, by each method of averaging gradients or weights",
    models=(),
    options=OPTIONS,
    measure=measure,
    run=run,
    table=table,
    draw=draw,
    note=(
        "training: the loss on a held-out set, after the given steps, over that of torch-ddp with the same seed; green "
        "within our bound. s to loss: until the loss that torch-ddp reaches, counting only a method's own steps; "
        "speedup: over torch DDP. sent: bytes by the rank or, over a link, by the host that sends most."
    ),
)
