"""What pages show of the committed results: `python -m benchmarks.pages` writes it.

That is the tables of `PAGES`, each between `<!-- table: NAME -->` and `<!-- end of table -->`, where NAME is one of
`TABLES`, and the chart in the README of the time that DDP adds to a step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchddp.harness.plots import figure_png, finish_panel, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
PAGES, CHART = (DOCS / "performance.md", DOCS / "muon.md"), DOCS / "images" / "cost_of_ddp.png"

_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
Rows = dict[str, dict[str, Any]]
Row = Sequence[str]
DEFAULT, OURS, BEST = "torch default", "torchddp default", "best"


def newest(case: str) -> Path:
    return max(RESULTS.glob(f"*-{case}-*.json"))


def loaded(case: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(newest(case).read_text())
    return content


def models(case: str) -> Iterator[tuple[dict[str, Any], Rows]]:
    """Each model's result, and its rows by name; `BEST` is torch's fastest."""
    for model in loaded(case)["results"]:
        rows = by_name(model["variants"])
        yield model, rows | ({BEST: rows[model["best_torch"]]} if "best_torch" in model else {})


def by_name(rows: list[dict[str, Any]]) -> Rows:
    return {row["name"]: row for row in rows}


def source(case: str) -> str:
    """When, where and how a result was measured, with a link to it."""
    result = loaded(case)
    machine = result["machine"]
    # Without the files that it wrote, and without --peers, which timed packages that the case no longer does.
    command = re.sub(r" --(out|output|json) \S+| --peers", "", result["command"])
    return (
        f"{result['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, {machine['system'].split('-')[0]}, Python "
        f"{machine['python']}, torch {machine['torch']}. "
        f"[All rows](../benchmarks/results/{newest(case).name}) of `{command}`."
    )


# --- cells -----------------------------------------------------------------------------------------------------------

Cell = Callable[[dict[str, Any], Rows], str]


def number(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def megabytes(nbytes: float) -> str:
    return f"{number(nbytes / 1e6)} MB"


def spread(quartiles: list[float]) -> str:
    low, median, high = (f"{value:.2f}" for value in quartiles)
    return f"{median} ({low} to {high})"


def size(nbytes: int) -> str:
    for unit, scale in (("MB", 2**20), ("KB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes} B"


def of(key: str) -> Cell:
    return lambda model, rows: str(model[key])


def median(name: str, key: str, unit: str = "ms") -> Cell:
    return lambda model, rows: f"{number(rows[name][key][1])} {unit}"


def extra(name: str) -> Cell:
    return lambda model, rows: megabytes(rows[name]["extra_bytes"])


def resident(name: str) -> Cell:
    return lambda model, rows: megabytes(rows[name]["peak_rss_bytes"] - rows["no DDP"]["peak_rss_bytes"])


def sent(name: str) -> Cell:
    return lambda model, rows: megabytes(max(rows[name]["sent_bytes"]))


def ratio(model: dict[str, Any], rows: Rows) -> str:
    return spread(rows[OURS]["ratio_to_best_torch"])


def costs(unit: str) -> dict[str, Cell]:
    cells = {"torch, default": DEFAULT, "torch, at its best": BEST, "torchddp": OURS}
    return {heading: median(name, "cost", unit) for heading, name in cells.items()} | {"torchddp / torch's best": ratio}


# --- tables ----------------------------------------------------------------------------------------------------------


# A table, and the case whose source is named below it.
Table = tuple[Callable[[], Iterator[Row]], str]


def of_models(case: str, columns: Mapping[str, Cell]) -> Table:
    """A row for each model."""

    def rows_of() -> Iterator[Row]:
        yield tuple(columns)
        for model, rows in models(case):
            yield [cell(model, rows) for cell in columns.values()]

    return rows_of, case


def crowded() -> Iterator[Row]:
    columns = {heading: cell for heading, cell in costs("ms").items() if heading != "torch, default"}
    yield "ranks on 2 cores", *columns
    for ranks in (2, 4, 8):
        ((model, rows),) = models(f"exposed_{ranks}_ranks")
        yield str(ranks), *(cell(model, rows) for cell in columns.values())


def collectives(ranks: int) -> Iterator[tuple[dict[str, Any], Rows]]:
    (result,) = loaded(f"collective_{ranks}_ranks")["results"]
    for entry in result["sizes"]:
        yield entry, by_name(entry["implementations"])


def all_reduce() -> Iterator[Row]:
    yield "size", "gloo", "best other package", "torchddp, in its buckets", "torchddp / best other"
    for entry, rows in collectives(2):
        best = entry["best_peer"]
        gloo, fastest, ours = (number(rows[name]["time_us"][1]) for name in ("gloo", best, "shm"))
        yield size(entry["bytes"]), gloo, f"{fastest} ({best})", ours, spread(rows["shm"]["best_peer_ratio"])


def peers_win() -> Iterator[Row]:
    """The cases in which another package's all-reduce beats our transport or backend, by the median of ratios."""
    yield "our all-reduce", "ranks", "size", "fastest package", "its median", "ours", "ours / fastest"
    for name, what in (("shm", "gradient buckets"), ("torchddp_shm", "any tensor, backend `torchddp_shm`")):
        for ranks in (2, 4, 8, 16):
            for entry, rows in collectives(ranks):
                if rows[name]["best_peer_ratio"][1] > 1:
                    best = entry["best_peer"]
                    times = (f"{number(rows[row]['time_us'][1])} us" for row in (best, name))
                    where = (what, str(ranks), size(entry["bytes"]), best)
                    yield *where, *times, spread(rows[name]["best_peer_ratio"])


# Labels of results that were saved before arguments got their present names.
RENAMED = {
    "torchddp, wire_dtype=torch.bfloat16": "torchddp, Precision(wire=torch.bfloat16)",
    "check_parameters_every=1": "Checks(parameters_every=1)",
    "find_nonfinite=True": "Checks(nonfinite=True)",
    'find_nonfinite="raise"': 'Checks(nonfinite="raise")',
}


def compressed() -> Iterator[Row]:
    yield "method", "step", "sent per host", "seconds to the loss", "speedup over torch DDP"
    (result,) = loaded("training_100mbit")["results"]
    for row in result["methods"]:
        step = f"{number(1000 * row['step_s'][1])} ms"
        seconds, speedup = number(row["arrival"]["seconds"]), f"{row['speedup']:.2f}"
        yield RENAMED.get(row["what"], row["what"]), step, megabytes(row["bytes_per_step"]), seconds, speedup


SHARDED = {
    "torch-ddp": "torch DDP, nothing sharded",
    "torch-zero": "torch ZeroRedundancyOptimizer",
    "torch-zero-both": "torch ZeroRedundancyOptimizer, bucket views and fused",
    "fsdp2": "torch FSDP2",
    "fairscale-fused": "fairscale, fused",
    "deepspeed": "DeepSpeed, ZeRO stage 2",
    "torchddp-c10d": "torchddp, process group",
    "torchddp-auto": "torchddp, shared memory",
}


def sharded() -> Iterator[Row]:
    found = list(models("sharded"))
    yield "training step", *(model["title"] for model, _ in found)
    for name in ("torch-zero-both", "fsdp2", "fairscale-fused", "deepspeed", "torchddp-c10d", "torchddp-auto"):
        yield SHARDED[name], *(median(name, "step_ms")(model, rows) for model, rows in found)


MUON = {
    "torch-ddp": "torch DDP, everything on every rank",
    "torch-zero": "torch DDP, two ZeroRedundancyOptimizers with bucket views",
    "fsdp2": "torch FSDP2, matrices gathered on every rank",
    "fairscale": "fairscale, two OSS",
    "deepspeed": "DeepSpeed, ZeRO stage 2, with its own Newton-Schulz",
    "deepspeed-standard": "DeepSpeed, ZeRO stage 2, with torch's Newton-Schulz",
    "torchddp-ddp-oss": "torchddp DDP and OSS",
    "torchddp-c10d": "torchddp, process group",
    "torchddp-auto": "torchddp, shared memory",
    "gram-in-oss": "torchddp, shared memory, with DeepSpeed's Newton-Schulz",
}


def muon(case: str) -> Iterator[Row]:
    ((model, rows),) = models(case)
    yield f"{model['world_size']} ranks", "step", "update alone", "update / torch DDP's"
    for name in MUON:
        if name in rows:
            times = (f"{number(rows[name][key][1])} ms" for key in ("step_ms", "update_ms"))
            yield MUON[name], *times, spread(rows[name]["update_ratio"])


def memory(case: str, names: Mapping[str, str]) -> Iterator[Row]:
    found, what = list(models(case)), {"after a step": "pss_bytes", "peak": "peak_bytes"}
    ranks = [model["world_size"] for model, _ in found]
    yield "memory, largest over ranks", *(f"{count} ranks, {label}" for count in ranks for label in what)
    for name, title in names.items():
        if all(name in rows for _, rows in found):
            yield title, *(megabytes(rows[name][key]) for _, rows in found for key in what.values())


def checks() -> Iterator[Row]:
    found = list(models("checks"))
    yield "step time, with / without", *(model["title"] for model, _ in found)
    for name in found[0][1]:
        if all("to_plain" in rows.get(name, ()) for _, rows in found):
            code = f"`{RENAMED.get(name, name)}`" if "(" in name or "=" in name else name
            label = "nothing (the same class again)" if name == "plain again" else code
            yield label, *(spread(rows[name]["to_plain"]) for _, rows in found)


def parameters(model: dict[str, Any], rows: Rows) -> str:
    return f"{model['parameters']} parameters"


TABLES: dict[str, Table] = {
    "added": of_models("exposed", {"model": of("title"), **costs("ms")}),
    "per_parameter": of_models("per_param", {"model": parameters, **costs("us")}),
    "crowded": (crowded, "exposed_8_ranks"),
    "memory": of_models(
        "memory",
        {
            "model": of("title"),
            "size of the gradients": lambda model, rows: megabytes(model["gradient_bytes"]),
            "torch, default": extra(DEFAULT),
            "torch, bucket views": extra("torch tuned, cap 25"),
            "torchddp": extra(OURS),
            "torchddp, resident set": resident(OURS),
        },
    ),
    "all_reduce": (all_reduce, "collective_2_ranks"),
    "peers_win": (peers_win, "collective_2_ranks"),
    "networks": of_models(
        "links",
        {
            "model": of("title"),
            "link": of("place"),
            "torch, default": median(DEFAULT, "step_ms"),
            "torchddp, default": median(OURS, "step_ms"),
        },
    ),
    "two_hosts": of_models(
        "links_4_ranks",
        {
            "model": of("title"),
            "torch, at its best": median(BEST, "step_ms"),
            "torchddp": median(OURS, "step_ms"),
            "sent per host, torch": sent(BEST),
            "sent per host, torchddp": sent(OURS),
        },
    ),
    "compressed": (compressed, "training_100mbit"),
    "sharded": (sharded, "sharded"),
    "sharded_memory": (partial(memory, "sharded_memory", SHARDED), "sharded_memory"),
    **{case: (partial(muon, case), case) for case in ("muon", "muon_4_ranks")},
    "muon_memory": (partial(memory, "muon_memory", MUON), "muon_memory"),
    "checks": (checks, "checks"),
}


def table(name: str) -> str:
    rows, case = TABLES[name]
    head, *body = rows()
    lines = [head, ["---", *("---:" for _ in head[1:])], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{source(case)}\n"


def filled(page: str) -> str:
    return _TABLE.sub(lambda found: f"{found[1]}\n{table(found[2])}\n{found[3]}", page)


# --- the chart -------------------------------------------------------------------------------------------------------

BARS = {
    DEFAULT: ("torch, default", "#c1c9d2"),
    BEST: ("torch, at its best", "#7b8794"),
    OURS: ("torchddp, default", "#d9480f"),
}
BAR_HEIGHT = 0.26


def chart() -> Figure:
    """Milliseconds that each class adds to a step, by model: medians, and lines from quartile to quartile."""
    figure, ((axis,),) = panels(1, 1, 8.0, 3.6)
    found = list(models("exposed"))
    for bar, (name, (label, color)) in enumerate(BARS.items()):
        places = [model + (bar - 1) * BAR_HEIGHT for model in range(len(found))]
        low, added_ms, high = zip(*(rows[name]["cost"] for _, rows in found), strict=True)
        errors = [[b - a for a, b in zip(*ends, strict=True)] for ends in ((low, added_ms), (added_ms, high))]
        lines = {"elinewidth": 0.8, "ecolor": "black"}
        bars = axis.barh(places, added_ms, 0.9 * BAR_HEIGHT, label=label, color=color, xerr=errors, error_kw=lines)
        axis.bar_label(bars, [f"{ms:.1f}" for ms in added_ms], padding=3, fontsize=8)
    axis.set_yticks(range(len(found)), [model["title"] for model, _ in found])
    axis.invert_yaxis()
    axis.tick_params(left=False)
    axis.legend(frameon=False, loc="lower right", fontsize=9)
    result = loaded("exposed")
    machine = f"{result['machine']['cores']} cores of an {result['machine']['cpu']}, {result['date'][:10]}"
    finish_panel(
        axis, f"What DDP adds to a training step: two ranks on {machine} (less is better)", "ms, with quartiles"
    )
    return figure


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))
    CHART.write_bytes(figure_png(chart(), dpi=160))
