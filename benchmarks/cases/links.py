"""The case `links`: steps on one host and over slow links, by bucket size, with planned buckets, and as predicted.

Two ranks, or more with --world-size, in one process group; classes and bucket sizes take turns. The emulated hosts need
root and the programs ip and tc; nothing is left behind.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from rich.table import Table
from rich.text import Text

from benchmarks.hosts import parse_place, place_at, place_text, quiet_count
from benchmarks.options import several
from torchddp._extension import CACHE_ENV
from torchddp.bench.cases import BenchCase, Job, Option, Result, Settings
from torchddp.bench.results import compared_rows, model_result, variants_table
from torchddp.bench.timing import Runner, build_runners, time_runners
from torchddp.ddp.module import DistributedDataParallel
from torchddp.harness.command import Display
from torchddp.harness.launch import Report
from torchddp.harness.models import make_batch
from torchddp.harness.plots import finish_panel, panels
from torchddp.harness.stats import paired_ratio
from torchddp.harness.tables import MB, number, plain_table, ranks_text, ratio_text
from torchddp.harness.variants import TORCHDDP, ArgumentError, Role, Variant
from torchddp.plan.record_profile import record_profile
from torchddp.plan.step_profile import StepProfile
from torchddp.simulate.network import Link
from torchddp.simulate.predict import Scene, predict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OUR_DEFAULT, PLANNED = "torchddp default", "torchddp auto"
SWEPT = "torchddp tuned, cap "
# Planning ends after eight synchronized steps.
PLANNING_STEPS = 10
# Consecutive steps of one variant whose bytes are counted, so that the barriers around them do not matter.
COUNTED_STEPS = 3
# Of each 1514 bytes on a shaped link, 1448 are payload: the limit counts Ethernet headers, but neither the preamble nor
# the gap.
PAYLOAD_SHARE = 1448 / 1514
MBIT = 1_000_000
OPTIONS = {
    "place": Option(
        (None, 10_000 * MBIT, 1_000 * MBIT, 100 * MBIT),
        several(parse_place),
        "host and rates of a link, such as host,1gbit. [default: host,10gbit,1gbit,100mbit]",
        quick=(None, 1_000 * MBIT),
    ),
}


# --- on a rank -------------------------------------------------------------------------------------------------------


def measure(job: Job, model: str, report: Report) -> dict[str, Any]:
    """Time every variant, count what it sends, and record the profile of our default for the simulator."""
    runners = build_runners(job, model)
    modules = {runner.variant.name: runner.module for runner in runners}
    planned, ours = modules[PLANNED], modules[OUR_DEFAULT]
    assert isinstance(planned, DistributedDataParallel) and isinstance(ours, DistributedDataParallel)
    batch = make_batch(model, job.seed, dist.get_rank(), 0)
    by_name = {runner.variant.name: runner for runner in runners}
    for _ in range(PLANNING_STEPS):
        by_name[PLANNED].step(batch)
    assert not planned.observers.get("bucket_planning").is_under_way
    timed = time_runners(job, model, runners, report)
    return {
        **timed,
        "sent_bytes": sent_bytes(job, runners, batch) if job.options["place"] else None,
        "profile": record_profile(ours, lambda: by_name[OUR_DEFAULT].step(batch), name=model),
        "buckets": len(planned.reducer.plan.buckets),
        "transport": ours.reducer.transport_name,
    }


def sent_bytes(job: Job, runners: Sequence[Runner], batch: Any) -> list[list[float]]:
    """Collective: bytes sent over the link in one step, [host][variant]."""
    mine = []
    for runner in runners:
        before = quiet_count()
        for _ in range(COUNTED_STEPS):
            runner.step(batch)
        mine.append((quiet_count() - before) / COUNTED_STEPS)
    by_rank: list[Any] = [None] * job.world_size
    dist.all_gather_object(by_rank, mine)
    return by_rank[:: job.world_size // 2]


# --- results ---------------------------------------------------------------------------------------------------------


def field_of(case: BenchCase, settings: Settings) -> tuple[Variant, ...]:
    """The variants: those of other cases, our class with every bucket size, and with planned buckets."""
    if settings.ours != TORCHDDP:
        raise ArgumentError("--ours: the case links plans torchddp's buckets; name other classes with --vs.")
    planned = Variant(PLANNED, Role.OURS, TORCHDDP, {"bucket_cap_mb": "auto"})
    return (*replace(settings, ours_tuned=True).variants_of(case), planned)


def run(case: BenchCase, settings: Settings, display: Display) -> list[Result]:
    """One launch at each place, then predictions of each link from the profiles of the others."""
    job = replace(settings.job_of(case), variants=field_of(case, settings))
    if job.world_size % 2:
        raise ArgumentError(f"--world-size must be even for the case links, which has two hosts, not {job.world_size}.")
    results: list[Result] = []
    profiles: list[StepProfile] = []
    for rate in job.options["place"]:
        display.start(place_text(rate))
        here = replace(job, options={"place": rate})
        with tempfile.TemporaryDirectory(prefix="torchddp-links-") as folder, place_at(rate, job.world_size) as place:
            # An empty folder, so that no cached plan is reused.
            raws = case.launch(here, display, replace(place, environment={**place.environment, CACHE_ENV: folder}))
        results += [place_result(job.variants, raw, job.world_size, rate) for raw in raws]
        profiles += [raw["profile"] for raw in raws]
    for result in results:
        result["predictions"] = predictions(result, results, profiles)
    return results


def place_result(variants: Sequence[Variant], raw: dict[str, Any], world_size: int, rate: int | None) -> Result:
    """One model at one place. The best of the sweep is chosen by the samples that are then reported for it."""
    step_ms = raw["step_ms"]
    best_torch, rows = compared_rows(variants, step_ms)
    names = [row["name"] for row in rows]
    for index, row in enumerate(rows):
        row["sent_bytes"] = raw["sent_bytes"] and [by_variant[index] for by_variant in raw["sent_bytes"]]
    swept = [index for index, name in enumerate(names) if name.startswith(SWEPT)]
    best = min(swept, key=lambda index: float(np.median(step_ms[index])))
    return model_result(
        "links",
        raw,
        world_size,
        rows,
        unit="ms",
        place=place_text(rate),
        rate=rate,
        transport=raw["transport"],
        rounds=int(step_ms.shape[1]),
        best_torch=best_torch,
        buckets=raw["buckets"],
        best_of_sweep=names[best],
        planned_to_best=paired_ratio(step_ms[names.index(PLANNED)], step_ms[best]).to_dict(),
    )


def row_of(result: Result, name: str) -> dict[str, Any]:
    row: dict[str, Any] = next(row for row in result["variants"] if row["name"] == name)
    return row


def predictions(result: Result, results: Sequence[Result], profiles: Sequence[StepProfile]) -> list[dict[str, Any]]:
    """Our step over this link, as predicted from the profile over every other link."""
    found = []
    for other, profile in zip(results, profiles, strict=True):
        # The simulator takes ranks of one host from the profile, so only links are predicted, and from links.
        if result["model"] != other["model"] or other is result or not result["rate"] or not other["rate"]:
            continue
        link = Link(result["place"], result["place"], result["rate"] / 8 * PAYLOAD_SHARE, None)
        predicted_ms = 1e3 * predict(profile, link, result["world_size"], Scene(result["world_size"] // 2)).step_s
        error = predicted_ms / row_of(result, OUR_DEFAULT)["step_ms"]["median"] - 1
        found.append({"recorded_over": other["place"], "predicted_ms": predicted_ms, "error": error})
    return found


# --- tables and plot -------------------------------------------------------------------------------------------------


def sent_text(row: dict[str, Any]) -> str:
    # By the busier host, because the step waits for it.
    return number(max(row["sent_bytes"]) / MB) if row["sent_bytes"] else ""


def table(result: Result) -> Table:
    def cells(row: dict[str, Any]) -> list[str | Text]:
        times = (number(row["step_ms"][key]) for key in ("median", "p90"))
        return [*times, sent_text(row), ratio_text(row["ratio_to_best_torch"])]

    columns = ("step p50\nms", "step\np90", "sent by a\nhost, MB", "to torch's best\np50 [95% CI]")
    found = variants_table(result, columns, cells)
    found.title = f"{found.title}, {result['place']}, our transport {result['transport']}"
    return found


def summary(results: Sequence[Result]) -> list[Table]:
    """Planned buckets compared with the best of the sweep, and predictions with measurements."""
    columns = ("buckets", "best of\nthe sweep", "planned / best\np50 [95% CI]", "planned /\ntorch's best")
    planned = plain_table("Planned buckets (bucket_cap_mb='auto'), whole steps", "place", *columns, second="model")
    columns = ("from a\nprofile over", "predicted\nms", "measured\nms", "error")
    predicted = plain_table("Predicted steps of torchddp (`torchddp simulate`)", "place", *columns, second="model")
    for result in results:
        where = (result["place"], result["model"])
        ratios = (result["planned_to_best"], row_of(result, PLANNED)["ratio_to_best_torch"])
        best = result["best_of_sweep"].removeprefix(SWEPT)
        planned.add_row(*where, str(result["buckets"]), f"cap {best}", *map(ratio_text, ratios))
        measured_ms = number(row_of(result, OUR_DEFAULT)["step_ms"]["median"])
        for row in result["predictions"]:
            ms = number(row["predicted_ms"])
            predicted.add_row(*where, row["recorded_over"], ms, measured_ms, f"{row['error']:+.0%}")
    return [planned, predicted] if predicted.row_count else [planned]


def draw(results: Sequence[Result]) -> Figure:
    """Step time by bucket size: one panel per place and model."""
    columns = min(4, len(results))
    rows = -(-len(results) // columns)
    figure, axes = panels(rows, columns, 3.6 * columns, 3.0 * rows)
    for axis in axes.flat[len(results) :]:
        axis.set_visible(False)
    for axis, result in zip(axes.flat, results, strict=False):
        medians = {row["name"]: row["step_ms"]["median"] for row in result["variants"]}
        swept = {float(name.removeprefix(SWEPT)): ms for name, ms in medians.items() if name.startswith(SWEPT)}
        axis.plot(swept.keys(), swept.values(), marker="o", markersize=3, color="#4c6ef5", label="torchddp, by cap")
        axis.axhline(medians[PLANNED], color="#d9480f", label="torchddp, planned")
        axis.axhline(medians[result["best_torch"]], color="#9aa5b1", linestyle="--", label="torch's best")
        axis.axhline(medians["no DDP"], color="#2b8a3e", linewidth=1, label="no DDP")
        axis.set_xscale("log")
        axis.set_xticks(list(swept), [f"{cap:g}" for cap in swept], fontsize=7)
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        finish_panel(
            axis, f"{result['place']}, {ranks_text(result['world_size'])}, {result['model']}", "MiB", "step, ms"
        )
    axes[0][0].legend(fontsize=7, frameon=False)
    return figure


CASE = BenchCase(
    name="links",
    title="a step on one host and on two hosts with a slow link, by bucket size (needs root)",
    models=("conv", "mlp"),
    quick_models=("conv",),
    seconds=60.0,
    caps_mb=(0.25, 1, 5, 25, 100),
    options=OPTIONS,
    measure=measure,
    run=run,
    table=table,
    summary=summary,
    draw=draw,
    note=(
        "links: forward and backward, in ms, of the slowest rank. Two hosts are network namespaces with a link of the "
        "given rate each way. sent: bytes over the link in one step, headers and acknowledgements included, of the "
        "host that sends more. auto: buckets planned from the measured step."
    ),
)
