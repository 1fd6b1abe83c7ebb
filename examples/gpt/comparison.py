"""Compares the losses and the costs of two classes trained with one seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from examples.gpt.metrics import summarize

# The sum of two ranks' gradients does not depend on their order, so we expect bitwise equality; the tolerance is for a
# backend that rounds differently.
LOSS_TOLERANCE = 1e-6
_CURVE_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#f2a65a", "linewidth": 4.0, "linestyle": "-"},
    {"color": "#1b3a5c", "linewidth": 1.4, "linestyle": (0, (4, 2))},
)


@dataclass(frozen=True)
class LossComparison:
    """The difference between two runs' losses, over all training steps and evaluations."""

    compared: int
    bitwise_equal: bool
    largest_difference: float
    first_different: str | None

    @property
    def equal(self) -> bool:
        return self.bitwise_equal or self.largest_difference <= LOSS_TOLERANCE

    def words(self) -> str:
        """The result as a sentence."""
        if self.bitwise_equal:
            return f"All {self.compared} losses are bitwise equal."
        verdict = "within" if self.equal else "MORE THAN"
        return (
            f"The losses differ by at most {self.largest_difference:.3g}, {verdict} the tolerance {LOSS_TOLERANCE:g}; "
            f"the first to differ is {self.first_different}."
        )

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "equal": self.equal, "tolerance": LOSS_TOLERANCE}


def merge_segments(segments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the consecutive segments of one resumed run into one record."""
    ordered = sorted(segments, key=lambda segment: segment["first_step"])
    merged = {key: [entry for part in ordered for entry in part[key]] for key in ("steps", "validation")}
    constant = {key: ordered[0][key] for key in ("world_size", "device", "parameters", "data", "versions", "transport")}
    return {"summary": summarize([dict(part) for part in ordered]), **constant, **merged}


def compare_losses(first: Mapping[str, Any], second: Mapping[str, Any]) -> LossComparison:
    """Compare every loss of two runs; a missing or non-finite loss counts as a difference."""
    losses = [
        {(kind, e["step"]): e["loss"] for kind in ("steps", "validation") for e in r[kind]} for r in (first, second)
    ]
    here, there = losses
    largest, first_different = 0.0, None
    for key in {**here, **there}:
        a, b = here.get(key, math.nan), there.get(key, math.nan)
        difference = abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf
        largest = max(largest, difference)
        if difference and first_different is None:
            kind = "training step" if key[0] == "steps" else "validation after step"
            first_different = f"{kind} {key[1]}: {a!r} and {b!r}"
    if not here and not there:
        return LossComparison(0, False, math.inf, "nothing: there are no losses")
    return LossComparison(len({**here, **there}), first_different is None, largest, first_different)


def result_table(records: Mapping[str, Mapping[str, Any]], title: str) -> Table:
    """The figures of each class, in at most 80 columns."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1))
    table.add_column("class")
    table.add_column("over")
    for heading in ("train\nloss", "valid.\nloss", "step ms\np50", "step ms\np90", "exposed\ncomm ms", "peak\nmem MB"):
        table.add_column(heading, justify="right")
    for name, record in records.items():
        summary = record["summary"]
        table.add_row(
            name,
            record["transport"],
            _number(summary["final_train_loss"], 4),
            _number(summary["final_validation_loss"], 4),
            _number(summary["step_ms_p50"], 1),
            _number(summary["step_ms_p90"], 1),
            _number(summary["exposed_communication_ms_p50"], 1),
            _number(summary["peak_rss_bytes"] / 1e6, 0),
        )
    return table


def verdict(records: Mapping[str, Mapping[str, Any]], comparison: LossComparison) -> str:
    """What the second class gains, and whether the losses are the same, in a sentence."""
    (theirs, first), (ours, second) = ((name, record["summary"]) for name, record in records.items())
    before, after = first["step_ms_p50"], second["step_ms_p50"]
    return (
        f"A step with {ours} takes {after / before:.2f} times as long as with {theirs} ({after:.0f} instead of "
        f"{before:.0f} ms). {comparison.words()}"
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def plot_losses(records: Mapping[str, Mapping[str, Any]], path: Path, title: str) -> None:
    """Plot both loss curves: the first wide and pale, the second thin and dashed on top of it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.8), dpi=150, layout="constrained")
    for (name, record), style in zip(records.items(), _CURVE_STYLES, strict=True):
        axes.plot(*_curve(record["steps"]), label=f"{name}, training", **style)
    for (name, record), style, marker in zip(records.items(), _CURVE_STYLES, ("o", "x"), strict=True):
        axes.plot(
            *_curve(record["validation"]),
            linestyle="none",
            marker=marker,
            markersize=9 if marker == "o" else 6,
            color=style["color"],
            label=f"{name}, validation",
            zorder=3,
        )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)
    pyplot.close(figure)


def _curve(entries: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float]]:
    return [entry["step"] for entry in entries], [entry["loss"] for entry in entries]
