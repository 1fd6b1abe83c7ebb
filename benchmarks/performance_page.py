"""Fill the tables of docs/performance.md from the committed results: `python -m benchmarks.performance_page`.

Each table goes between `<!-- table: NAME -->` and `<!-- end of table -->`; NAME is one of `TABLES`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"

_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
Row = Sequence[str]


def newest(case: str) -> Path:
    return max(RESULTS.glob(f"*-{case}-*.json"))


def loaded(case: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(newest(case).read_text())
    return content


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in rows}


def number(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def spread(quartiles: list[float]) -> str:
    low, median, high = (f"{value:.2f}" for value in quartiles)
    return f"{median} ({low} to {high})"


def size(nbytes: int) -> str:
    for unit, scale in (("MB", 2**20), ("KB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes} B"


def source(case: str) -> str:
    """When, where and how a result was measured, with a link to it."""
    result = loaded(case)
    machine = result["machine"]
    return (
        f"{result['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, {machine['system'].split('-')[0]}, Python "
        f"{machine['python']}, torch {machine['torch']}. "
        f"[All rows](../benchmarks/results/{newest(case).name}) of `{_shown(result['command'])}`."
    )


def _shown(command: str) -> str:
    """Without the files that it wrote, and without --peers, which timed packages that the case no longer does."""
    return re.sub(r" --(out|output|json) \S+| --peers", "", command)


# --- the tables ---


def added() -> Iterator[Row]:
    yield "model", "torch, default", "torch, at its best", "torchddp", "torchddp / torch's best"
    for model in loaded("exposed")["results"]:
        rows = by_name(model["variants"])
        ours = rows["torchddp default"]
        costs = [rows["torch default"]["cost"], rows[model["best_torch"]]["cost"], ours["cost"]]
        yield model["title"], *(f"{number(cost[1])} ms" for cost in costs), spread(ours["ratio_to_best_torch"])


def per_parameter() -> Iterator[Row]:
    yield "model", "torch, default", "torch, at its best", "torchddp", "torchddp / torch's best"
    for model in loaded("per_param")["results"]:
        rows = by_name(model["variants"])
        ours = rows["torchddp default"]
        costs = [rows["torch default"]["cost"], rows[model["best_torch"]]["cost"], ours["cost"]]
        parameters = f"{model['parameters']} parameters"
        yield parameters, *(f"{number(cost[1])} us" for cost in costs), spread(ours["ratio_to_best_torch"])


def crowded() -> Iterator[Row]:
    yield "ranks on 2 cores", "torch, at its best", "torchddp", "torchddp / torch's best"
    for ranks in (2, 4, 8):
        (model,) = loaded(f"exposed_{ranks}_ranks")["results"]
        rows = by_name(model["variants"])
        ours, best = rows["torchddp default"], rows[model["best_torch"]]
        costs = (f"{number(row['cost'][1])} ms" for row in (best, ours))
        yield str(ranks), *costs, spread(ours["ratio_to_best_torch"])


def memory() -> Iterator[Row]:
    yield "model", "size of the gradients", "torch, default", "torch, bucket views", "torchddp"
    for model in loaded("memory")["results"]:
        rows = by_name(model["variants"])
        extra = (rows[name]["extra_bytes"] for name in ("torch default", "torch tuned, cap 25", "torchddp default"))
        yield model["title"], *(f"{number(nbytes / 1e6)} MB" for nbytes in (model["gradient_bytes"], *extra))


def _collectives(ranks: int) -> list[dict[str, Any]]:
    (result,) = loaded(f"collective_{ranks}_ranks")["results"]
    rows: list[dict[str, Any]] = result["sizes"]
    return rows


def all_reduce() -> Iterator[Row]:
    yield "size", "gloo", "best other package", "torchddp, in its buckets", "torchddp / best other"
    for entry in _collectives(2):
        rows = by_name(entry["implementations"])
        times = {name: number(row["time_us"][1]) for name, row in rows.items()}
        best, ours = entry["best_peer"], rows["shm"]
        yield (
            size(entry["bytes"]),
            times["gloo"],
            f"{times[best]} ({best})",
            times["shm"],
            spread(ours["best_peer_ratio"]),
        )


def peers_win() -> Iterator[Row]:
    """The cases in which another package's all-reduce beats our transport or backend, by the median of ratios."""
    yield "our all-reduce", "ranks", "size", "fastest package", "its median", "ours", "ours / fastest"
    for name, what in (("shm", "gradient buckets"), ("torchddp_shm", "any tensor, backend `torchddp_shm`")):
        for ranks in (2, 4, 8, 16):
            for entry in _collectives(ranks):
                rows = by_name(entry["implementations"])
                ratio = rows[name]["best_peer_ratio"]
                if ratio[1] > 1:
                    best = entry["best_peer"]
                    times = (f"{number(rows[row]['time_us'][1])} us" for row in (best, name))
                    yield what, str(ranks), size(entry["bytes"]), best, *times, spread(ratio)


def networks() -> Iterator[Row]:
    yield "model", "link", "torch, default", "torchddp, default"
    for entry in loaded("links")["results"]:
        rows = by_name(entry["variants"])
        steps = (f"{number(rows[name]['step_ms'][1])} ms" for name in ("torch default", "torchddp default"))
        yield entry["title"], entry["place"], *steps


def two_hosts() -> Iterator[Row]:
    yield "model", "torch, at its best", "torchddp", "sent per host, torch", "sent per host, torchddp"
    for model in loaded("links_4_ranks")["results"]:
        rows = by_name(model["variants"])
        both = [rows[model["best_torch"]], rows["torchddp default"]]
        steps = (f"{number(row['step_ms'][1])} ms" for row in both)
        yield model["title"], *steps, *(f"{number(max(row['sent_bytes']) / 1e6)} MB" for row in both)


def compressed() -> Iterator[Row]:
    yield "method", "step", "sent per host", "seconds to the loss", "speedup over torch DDP"
    (result,) = loaded("training_100mbit")["results"]
    for row in result["methods"]:
        sent, step = f"{number(row['bytes_per_step'] / 1e6)} MB", f"{number(1000 * row['step_s'][1])} ms"
        yield row["what"], step, sent, number(row["arrival"]["seconds"]), f"{row['speedup']:.2f}"


def sharded() -> Iterator[Row]:
    models = loaded("sharded")["results"]
    yield "training step", *(model["title"] for model in models)
    rows = [by_name(model["variants"]) for model in models]
    for name in ("torch-zero-both", "fsdp2", "fairscale-fused", "deepspeed", "torchddp-c10d", "torchddp-auto"):
        yield _LABELS[name], *(f"{number(variants[name]['step_ms'][1])} ms" for variants in rows)


def sharded_memory() -> Iterator[Row]:
    models = loaded("sharded_memory")["results"]
    what = (("pss_bytes", "after a step"), ("peak_bytes", "peak"))
    yield (
        "memory, largest over ranks",
        *(f"{model['world_size']} ranks, {label}" for model in models for _, label in what),
    )
    rows = [by_name(model["variants"]) for model in models]
    for name in ("torch-ddp", "torch-zero", "fsdp2", "torchddp-c10d", "torchddp-auto"):
        cells = (variants[name]["largest"][key] for variants in rows for key, _ in what)
        yield _LABELS[name], *(f"{number(nbytes / 1e6)} MB" for nbytes in cells)


_LABELS = {
    "torch-ddp": "torch DDP, nothing sharded",
    "torch-zero": "torch ZeroRedundancyOptimizer",
    "torch-zero-both": "torch ZeroRedundancyOptimizer, bucket views and fused",
    "fsdp2": "torch FSDP2",
    "fairscale-fused": "fairscale, fused",
    "deepspeed": "DeepSpeed, ZeRO stage 2",
    "torchddp-c10d": "torchddp, process group",
    "torchddp-auto": "torchddp, shared memory",
}


def checks() -> Iterator[Row]:
    models = loaded("checks")["results"]
    yield "step time, with / without", *(model["title"] for model in models)
    rows = [by_name(model["variants"]) for model in models]
    for name in rows[0]:
        if all("to_plain" in variants[name] for variants in rows):
            label = (
                "nothing (the same class again)"
                if name == "plain again"
                else f"`{name}`"
                if "(" in name or "=" in name
                else name
            )
            yield label, *(spread(variants[name]["to_plain"]) for variants in rows)


TABLES: dict[str, tuple[Callable[[], Iterator[Row]], str]] = {
    "added": (added, "exposed"),
    "per_parameter": (per_parameter, "per_param"),
    "crowded": (crowded, "exposed_8_ranks"),
    "memory": (memory, "memory"),
    "all_reduce": (all_reduce, "collective_2_ranks"),
    "peers_win": (peers_win, "collective_2_ranks"),
    "networks": (networks, "links"),
    "two_hosts": (two_hosts, "links_4_ranks"),
    "compressed": (compressed, "training_100mbit"),
    "sharded": (sharded, "sharded"),
    "sharded_memory": (sharded_memory, "sharded_memory"),
    "checks": (checks, "checks"),
}


def table(name: str) -> str:
    rows, case = TABLES[name]
    head, *body = rows()
    lines = [head, ["---", *("---:" for _ in head[1:])], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{source(case)}\n"


def filled(page: str) -> str:
    return _TABLE.sub(lambda found: f"{found[1]}\n{table(found[2])}\n{found[3]}", page)


def main() -> None:
    """Write the tables into the page."""
    PAGE.write_text(filled(PAGE.read_text()))
    typer.echo(PAGE)


if __name__ == "__main__":
    typer.run(main)
