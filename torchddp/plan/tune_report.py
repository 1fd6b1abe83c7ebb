"""What `torchddp tune` shows: the table, the curve, the page. All from its document, so a saved one gives the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from torchddp.harness.page import PagePlot, Section, page_table
from torchddp.harness.plots import figure_png
from torchddp.harness.tables import number, plain_table, ranks_text, ratio_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MB = 1e6
NOTE = (
    "A step is forward and backward of the slowest rank; ratios are per round. Expected: what the planner's model says "
    "from the measured times of gradients and messages. Marked: the choice, which is the fastest, or one that no "
    "measurement tells from it."
)


def title(result: dict[str, Any]) -> str:
    """What was tuned."""
    return (
        f"{result['model']}: {result['parameters']} gradients, {result['gradient_bytes'] / MB:.3g} MB, "
        f"{ranks_text(result['world_size'])} x {result['threads']} over {result['transport']}"
    )


def measured_lines(result: dict[str, Any]) -> list[str]:
    """The measurements that the plan is made from."""
    cost = result["cost"]
    return [
        f"Computation alone takes {number(result['compute_ms'])} ms. A message takes {number(cost['alpha_us'])} us and "
        f"{number(cost['beta_ns_per_byte'])} ns a byte (the line misses its points by {cost['misfit']:.0%})."
    ]


def answer(result: dict[str, Any]) -> str:
    """What to write in the program."""
    chosen = next(row for row in result["candidates"] if row["chosen"])
    if not chosen["argument"]:
        return "Leave bucket_cap_mb out: nothing measured is faster than the default."
    ratio = chosen["ratio_to_default"]["median"]
    gain = f" ({1 - ratio:.0%} less time a step than the default)" if ratio and ratio < 0.995 else ""
    return f"DistributedDataParallel(model, {chosen['argument']}){gain}"


def tune_table(result: dict[str, Any]) -> Table:
    """A row per candidate."""
    table = plain_table(f"{title(result)}, {result['rounds']} rounds", "buckets by")
    for heading in ("buckets", "step p50\nms", "step\np90", "expected\nms", "to the default\np50 [p25..p75]"):
        table.add_column(Text(heading), justify="right", no_wrap=True)
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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7.5, 4.2))
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
    axis.set_xlabel("bucket_cap_mb, MiB")
    axis.set_ylabel("step, ms")
    axis.set_title(title(result), fontsize=9)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    return figure


def page_sections(result: dict[str, Any]) -> list[Section]:
    """The page: the answer, the curve, the table."""
    curve = PagePlot(figure_png(draw_curve(result)), "Step time over bucket size, measured and expected")
    return [
        Section("What to use", [answer(result), *measured_lines(result)]),
        Section("Step time by bucket size", [curve, page_table(tune_table(result)), NOTE]),
    ]
