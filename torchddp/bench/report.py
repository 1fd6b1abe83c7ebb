"""The tables a person reads. Built from result dicts only, so a saved JSON gives the same tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchddp.bench.collective import report as collective
from torchddp.bench.overlap import report as overlap
from torchddp.bench.scaling import report as scaling
from torchddp.bench.startup import report as startup
from torchddp.bench.step_time import report as step_time
from torchddp.harness.tables import MB, number, plain_table, ratio_text, size_text

# With more rounds than this in which noise exceeded torch's cost, a table says nothing about a goal.
MAX_ODD_SHARE = 0.1


def timed_table(result: dict[str, Any]) -> Table:
    """One model: every variant with its step, its cost and its ratio to torch's best."""
    table = plain_table(f"{result['case']} · {size_text(result)}, {result['rounds']} rounds", "variant")
    for heading in ("step p50\nms", "step\np90", f"cost p50\n{result['unit']}", "cost\np90"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(Text("to torch's best\np50 [p25..p75]"), justify="right", no_wrap=True)
    for row in result["variants"]:
        cells: list[str | Text] = [row["name"], number(row["step_ms"]["median"]), number(row["step_ms"]["p90"])]
        if "cost" in row:
            cells += [number(row["cost"]["median"]), number(row["cost"]["p90"])]
            cells.append(ratio_text(row["ratio_to_best_torch"]))
        else:
            cells += ["", "", ""]
        table.add_row(*cells, style="bold" if row["role"] == "ours" else "")
    return table


def memory_table(result: dict[str, Any]) -> Table:
    """One model: peak resident set of each variant and what it holds beyond the bare model."""
    table = plain_table(f"memory · {size_text(result)}", "variant")
    for heading in ("peak\nMB", "beyond no DDP\nMB", "in copies of\nthe gradients", "held by .grad\nMB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["variants"]:
        local = row["role"] == "local"
        table.add_row(
            row["name"],
            f"{row['peak_rss_bytes'] / MB:.1f}",
            "" if local else f"{row['extra_bytes'] / MB:.1f}",
            "" if local else f"{row['extra_gradient_copies']:.2f}",
            f"{row['grad_storage_bytes'] / MB:.1f}",
            style="bold" if row["role"] == "ours" else "",
        )
    return table


def _row(result: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in result["variants"] if row["name"] == name)
    return found


def our_row(result: dict[str, Any]) -> dict[str, Any]:
    """The class under test: its first row, which is the one that was not tuned."""
    found: dict[str, Any] = next(row for row in result["variants"] if row["role"] == "ours")
    return found


def goal_text(result: dict[str, Any]) -> Text:
    """What became of the result's goal, if there is one."""
    return verdict_text(result["goal_ratio"], our_row(result)["ratio_to_best_torch"])


def verdict_text(goal: float | None, ratio: dict[str, Any]) -> Text:
    """Whether the goal, if there is one, is met, missed, or within the noise (the median's 95% interval holds it)."""
    if goal is None:
        return Text("")
    if ratio["odd_rounds"] > MAX_ODD_SHARE * ratio["rounds"]:
        return Text(f"{goal:g} unclear", style="yellow")
    low, high = ratio["ci95_low"], ratio["ci95_high"]
    if high is not None and high <= goal:
        return Text(f"{goal:g} met", style="green")
    if low is None or low > goal:
        return Text(f"{goal:g} missed", style="red")
    return Text(f"{goal:g} unclear", style="yellow")


def summary_table(results: Sequence[dict[str, Any]]) -> Table:
    """All timed results, one line each, wins and losses alike."""
    table = plain_table("Summary: cost of ours against torch's best (per_param in us, exposed in ms)", "case")
    table.add_column("model", overflow="fold")
    for heading in ("torch\ndefault", "torch best\n@ cap MiB", "ours", "ours / torch best\np50 [p25..p75]"):
        table.add_column(Text(heading), justify="right", no_wrap=True)
    table.add_column("goal", no_wrap=True)
    for result in results:
        best, ours = _row(result, result["best_torch"]), our_row(result)
        cap = f" @{best['options']['bucket_cap_mb']:g}" if best["options"] else " default"
        table.add_row(
            result["case"],
            result["model"],
            number(_row(result, "torch default")["cost"]["median"]),
            number(best["cost"]["median"]) + cap,
            number(ours["cost"]["median"]),
            ratio_text(ours["ratio_to_best_torch"]),
            goal_text(result),
        )
    return table


def origin(document: dict[str, Any]) -> Iterable[Text]:
    """Where and with what the numbers were made."""
    machine = document["machine"]
    commit = (machine["git_commit"] or "no commit")[:12] + (" (changed)" if machine["git_dirty"] else "")
    yield Text(
        f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_average_1min']:g} · torch "
        f"{machine['torch']} · torchddp {machine['torchddp'] or 'not installed'} · {commit}",
        style="dim",
    )
    yield Text(document["command"], style="dim")


COST_NOTE = (
    "A cost is the step minus the local step near it; a ratio is per round; both are then medians over the rounds."
)
MEMORY_NOTE = (
    "memory: resident set of the largest rank, each variant in its own processes. Beyond no DDP: buckets, the "
    "transport's own buffers, and gradients alive beside their bucket."
)
TUNED_NOTE = "tuned: gradient_as_bucket_view, batched_grad_copy, static_graph, and the bucket_cap_mb named."

# By case: how a result is shown, and what a reader needs to know to judge it.
TABLES: dict[str, Callable[[dict[str, Any]], Table]] = {
    "step_time": step_time.step_time_table,
    "overlap": overlap.overlap_table,
    "collective": collective.collective_table,
    "startup": startup.startup_table,
    "memory": memory_table,
    "scaling": scaling.scaling_table,
    "per_param": timed_table,
    "exposed": timed_table,
}
NOTES: dict[str, str] = {
    "step_time": step_time.FOOTNOTE,
    "overlap": overlap.FOOTNOTE,
    "collective": collective.FOOTNOTE,
    "startup": startup.FOOTNOTE,
    "memory": MEMORY_NOTE,
    "scaling": scaling.FOOTNOTE,
    "per_param": COST_NOTE,
    "exposed": COST_NOTE,
}


def case_names(document: dict[str, Any]) -> tuple[str, ...]:
    """The cases of a run, in its order."""
    return tuple(dict.fromkeys(result["case"] for result in document["results"]))


def case_notes(document: dict[str, Any]) -> Iterable[str]:
    """What each case of the run means, once."""
    cases = case_names(document)
    if set(cases) - {"collective"}:
        yield TUNED_NOTE
    yield from dict.fromkeys(NOTES[case] for case in cases)


def warnings(document: dict[str, Any]) -> Iterable[str]:
    """Why these numbers may not be quoted as they are."""
    machine = document["machine"]
    if any(_odd_share(result) > MAX_ODD_SHARE for result in document["results"]):
        yield f"In over {MAX_ODD_SHARE:.0%} of a table's rounds noise exceeded torch's cost: its ratio is uncertain."
    if machine["load_average_1min"] > machine["cores"] / 2:
        yield "Other programs kept the machine busy when the run began: expect wide spreads."
    if document["settings"]["quick"]:
        yield "--quick is a smoke test: few rounds, fewer caps and sizes. Do not quote it."


def _odd_share(result: dict[str, Any]) -> float:
    ratios = [row.get("ratio_to_best_torch") or row.get("hidden") for row in result.get("variants", ())]
    return max((ratio["odd_rounds"] / ratio["rounds"] for ratio in ratios if ratio), default=0.0)


def summaries(results: Sequence[dict[str, Any]]) -> list[Table]:
    """The summary of the costs, where there are any."""
    costs = [result for result in results if result["case"] in ("per_param", "exposed")]
    return [summary_table(costs)] if costs else []


def render(document: dict[str, Any]) -> RenderableType:
    """The whole report."""
    results = document["results"]
    parts: list[RenderableType] = []
    for table in [*(TABLES[result["case"]](result) for result in results), *summaries(results)]:
        parts += [table, ""]
    parts += [Text(note, style="dim") for note in case_notes(document)]
    return Group(*parts, *origin(document), *(Text(text, style="yellow") for text in warnings(document)))
