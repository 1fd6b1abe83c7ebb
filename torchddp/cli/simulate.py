"""`torchddp simulate`: a recorded step on other links, with more ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torchddp.cli.options import JsonFile, check_loads, write_outputs
from torchddp.harness.command import make_console, output_option
from torchddp.harness.machine import write_json
from torchddp.harness.page import write_page
from torchddp.harness.variants import ArgumentError
from torchddp.plan.buckets import best_buckets
from torchddp.plan.step_profile import ProfileError, StepProfile, load_profile
from torchddp.simulate import report
from torchddp.simulate.network import (
    ALGORITHMS,
    AUTO,
    MAX_RANKS,
    MEASURED,
    NETWORKS,
    NVLINK,
    PRESETS,
    Layout,
    Link,
    parse_link,
)
from torchddp.simulate.predict import Point, Scene, sweep

HELP = f"""Predict step time and efficiency on other links and with more ranks, from a recorded profile.

\b
Links: {", ".join(PRESETS)}; measured (the recorded one);
or a rate with maybe a latency, like 25gbit,15us (without: as recorded).
What is modelled and what is not: docs/simulate.md. No GPU and no other rank is needed.

\b
Examples:
  torchddp tune --model gpt --profile gpt.json
      record a profile first
  torchddp simulate gpt.json
      networks from 1 to 400 Gbit/s, 1 to {MAX_RANKS} ranks
  torchddp simulate gpt.json --link measured --link 100mbit --ranks 2,4,8
      the recorded link, and one slower with the same latency
  torchddp simulate gpt.json --link ib400 --ranks-per-host 8
      hosts with 8 ranks each, NVLink inside them
  torchddp simulate gpt.json --html report.html --plot efficiency.png --json all.json
      keep it
"""


def parse_ranks(text: str) -> tuple[int, ...]:
    """'8,2,8' -> (2, 8); ArgumentError for what is no list of numbers in range."""
    try:
        ranks = {int(part) for part in text.split(",")}
    except ValueError:
        raise ArgumentError(f"--ranks wants numbers of ranks with commas, like 2,8,64, not '{text}'.") from None
    if not all(1 <= count <= MAX_RANKS for count in ranks):
        raise ArgumentError(f"--ranks wants numbers from 1 to {MAX_RANKS}, not '{text}'.")
    return tuple(sorted(ranks))


def _choose_links(asked: Sequence[str], profile: StepProfile) -> list[Link]:
    if asked:
        return list({link.name: link for link in map(parse_link, asked)}.values())
    recorded = [MEASURED] if profile.world_size > 1 else []
    return [*recorded, *(PRESETS[name] for name in NETWORKS)]


def _predict(profile: StepProfile, links: Sequence[Link], ranks: Sequence[int], scene: Scene) -> list[Point]:
    # Not before it is needed: `torchddp doctor` must start where the extension does not load.
    check_loads()
    from torchddp.cli.tune_run import DEFAULT_CAPS_MB, make_candidates

    candidates = make_candidates(profile, DEFAULT_CAPS_MB)
    by_cap = {candidate.cap_mb: candidate.buckets for candidate in candidates if candidate.cap_mb is not None}
    return sweep(profile, links, ranks, scene, by_cap, best_buckets)


def _show(profile: StepProfile, points: Sequence[Point], scene: Scene, console: Console) -> None:
    console.print(report.profile_text(profile), markup=False, highlight=False)
    for group in report.by_link(points):
        console.print("", report.link_table(group), sep="\n")
    console.print()
    for group in report.by_link(points):
        console.print(report.advice(profile, group), markup=False, highlight=False)
    for note in report.notes(profile, scene):
        console.print(note, style="dim", markup=False, highlight=False)


def simulate(
    context: typer.Context,
    profile_path: Annotated[Path, typer.Argument(metavar="PROFILE", help="What `torchddp tune --profile` wrote.")],
    link: Annotated[
        list[str] | None, typer.Option(help="Between hosts; repeatable. [default: measured, and all networks]")
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help=f"Numbers of ranks, like 2,8,64. [default: powers of two up to {MAX_RANKS}]")
    ] = None,
    ranks_per_host: Annotated[int, typer.Option(help="Ranks that share a host and its link.")] = 1,
    inner_link: Annotated[str, typer.Option(help="Between the ranks of a host.")] = NVLINK.name,
    algorithm: Annotated[str, typer.Option(help=f"One of {', '.join(ALGORITHMS)}.")] = AUTO,
    json_path: JsonFile = None,
    plot: Annotated[Path | None, output_option("Write a PNG of efficiency over ranks.")] = None,
    html: Annotated[Path | None, output_option("Write one page with plans, plot and tables.")] = None,
) -> None:
    world_sizes = tuple(2**i for i in range(MAX_RANKS.bit_length())) if ranks is None else parse_ranks(ranks)
    Layout(1, ranks_per_host)  # refuses what no host can have
    scene = Scene(ranks_per_host, parse_link(inner_link), algorithm)
    try:
        profile = load_profile(profile_path)
    except ProfileError as error:
        raise ArgumentError(str(error)) from error
    points = _predict(profile, _choose_links(link or (), profile), world_sizes, scene)
    console = make_console()
    _show(profile, points, scene, console)
    command = context.obj["command"]
    document = report.document(profile, points, scene, command)
    title = f"torchddp simulate: {profile.model}"
    write_outputs(
        console,
        (json_path, lambda path: write_json(path, document)),
        (plot, lambda path: path.write_bytes(report.efficiency_png(points))),
        (html, lambda path: write_page(path, title, report.page_sections(profile, points, scene), [command], document)),
    )
