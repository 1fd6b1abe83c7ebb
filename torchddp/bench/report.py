"""The report of a run, for the terminal and as files. Depends on the run's document only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchddp.bench.cases import BenchCase
from torchddp.bench.registry import CASES
from torchddp.harness.machine import machine_slug, write_json
from torchddp.harness.plots import figure_png
from torchddp.harness.tables import (
    MB,
    bytes_text,
    is_known,
    load_warning,
    number,
    origin,
    plain_table,
    ratio_sign,
    ratio_text,
)
from torchddp.harness.variants import TORCHDDP

# Ratios are uncertain if noise exceeded torch's cost in more than this share of the rounds.
MAX_ODD_SHARE = 0.1
BAR, MAX_BARS = "█", 20
BAR_NOTE = (
    "Time of a step, or what the class adds to it (exposed, per_param, memory): less is better. "
    "Below 0: noise exceeded it. A ratio is taken in each round, so it may differ from that of the medians."
)
TUNED_NOTE = "tuned: gradient_as_bucket_view, batched_grad_copy, static_graph, and the given bucket_cap_mb (cap)."


def case_names(document: dict[str, Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(result["case"] for result in document["results"]))


def results_of(document: dict[str, Any], case: str) -> list[dict[str, Any]]:
    return [result for result in document["results"] if result["case"] == case]


def verdict(document: dict[str, Any]) -> str:
    """In how many comparisons the class under test is faster than torch's best variant, and how much memory it adds."""
    subject = _subject(document, "the class under test")
    rows = [row for result in document["results"] for row in result.get("variants", ()) if row["role"] == "ours"]
    ratios = [row["ratio_to_best_torch"] for row in rows if row.get("ratio_to_best_torch")]
    said = [_speed_verdict(subject, ratios)] if ratios else []
    pairs = [(result["model"], *_ours_and_best(result)) for result in results_of(document, "memory")]
    adds = [
        f"{ours['extra_bytes'] / best['extra_bytes']:.2f}x torch's best ({model})"
        for model, ours, best in pairs
        if min(ours["extra_bytes"], best["extra_bytes"]) > MB  # less is noise
    ]
    said += [f"Peak memory that {subject} adds: {', '.join(adds)}."] if adds else []
    said = [text.replace("the", "The", 1) if text.startswith("the ") else text for text in said]
    return " ".join(said) or f"Measured: {', '.join(case_names(document))}."


def _speed_verdict(subject: str, ratios: list[dict[str, Any]]) -> str:
    signs = Counter(map(ratio_sign, ratios))
    words = {-1: "faster", 1: "slower", 0: "no measurable difference"}
    if len(signs) == 1:
        (sign,) = signs
        places = "" if len(ratios) == 1 else f" in all {len(ratios)} comparisons"
        if sign == 0:
            better = "Run longer (--seconds) on an idle machine."
            return f"Too noisy to tell{places} whether {subject} is faster than torch's best. {better}"
        return f"{subject} is {words[sign]} than torch's best{places}."
    counts = ", ".join(f"{words[sign]} in {signs[sign]}" for sign in words if signs[sign])
    return f"{subject} against torch's best, in {len(ratios)} comparisons: {counts}."


def _ours_and_best(result: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    key = CASES[result["case"]].key
    rows = {role: [row for row in result["variants"] if row["role"] == role] for role in ("ours", "torch")}
    ours, best = (min(found, key=lambda row: _value(row, key)) for found in rows.values())
    return ours, best


def warnings(document: dict[str, Any]) -> Iterable[str]:
    machine = document["machine"]
    rows = [row for result in document["results"] for row in result.get("variants", ())]
    ratios = [ratio for row in rows if (ratio := row.get("ratio_to_best_torch"))]
    if any(ratio["odd_rounds"] > MAX_ODD_SHARE * ratio["rounds"] for ratio in ratios):
        yield f"In over {MAX_ODD_SHARE:.0%} of a table's rounds, noise exceeded torch's cost; its ratios are uncertain."
    yield from load_warning(machine)
    if document["settings"]["quick"]:
        yield "--quick is a smoke test with few rounds and sizes. Do not quote its numbers."


def comparison(document: dict[str, Any]) -> Table:
    """What a user can act on: a row per model, of the class under test against torch's best variant."""
    name = _subject(document, "yours")
    columns = (name, "torch's\nbest", "ratio\np50 [95% CI]")
    table = plain_table(f"{name} against torch's best", "case", *columns, second="model", notes=[BAR_NOTE])
    table.add_column(f"{BAR} = 10%", no_wrap=True)
    for result in document["results"]:
        case = CASES[result["case"]]
        ours, best = _ours_and_best(result)
        ratio = ours.get("ratio_to_best_torch")
        if ratio:
            shown, share = ratio_text(ratio), ratio["median"] if is_known(ratio) else None
        else:
            share = _value(ours, case.key) / _value(best, case.key) if _value(best, case.key) > 0 else None
            shown = Text("" if share is None else f"{share:.2f}")
        bar = "" if share is None else BAR * max(0, min(MAX_BARS, round(10 * share)))
        table.add_row(case.name, result["model"], _text(ours, case), _text(best, case), shown, bar)
    return table


def _subject(document: dict[str, Any], other: str) -> str:
    return "torchddp" if document["settings"].get("ours", TORCHDDP) == TORCHDDP else other


def _value(row: dict[str, Any], key: str) -> float:
    value: float = row[key]["median"] if isinstance(row[key], dict) else row[key]
    return value


def _text(row: dict[str, Any], case: BenchCase) -> str:
    value = _value(row, case.key)
    return bytes_text(value) if case.key.endswith("bytes") else f"{number(value)} {case.unit}"


def render(document: dict[str, Any], *, developer: bool = True) -> RenderableType:
    parts: list[RenderableType]
    if developer:
        cases = [CASES[name] for name in case_names(document)]
        tables = [CASES[result["case"]].table(result) for result in document["results"]]
        tables += [table for case in cases if case.summary for table in case.summary(results_of(document, case.name))]
        parts = [part for table in tables for part in (table, "")]
        tuned = [TUNED_NOTE] if any(case.models and case.caps_mb for case in cases) else []
        parts += [Text(note, style="dim") for note in dict.fromkeys([*tuned, *(case.note for case in cases)])]
    else:
        parts = [comparison(document), ""]
    cautions = [Text(text, style="yellow") for text in warnings(document)]
    return Group(*parts, Text(verdict(document), style="bold"), *origin(document), *cautions)


def save_results(document: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for case in case_names(document):
        results = results_of(document, case)
        machine = {**document["machine"], "gpu": results[0].get("gpu")}
        stem = f"{document['date'][:10]}-{case}-{machine_slug(machine)}"
        write_json(folder / f"{stem}.json", {**document, "results": results})
        (folder / f"{stem}.png").write_bytes(figure_png(CASES[case].draw(results), dpi=150))
