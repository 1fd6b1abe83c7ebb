"""`torchddp simulate`: predicts a recorded step on other networks and with more ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torchddp.harness import command
from torchddp.harness.machine import date_text, now, write_json
from torchddp.harness.variants import ArgumentError
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
from torchddp.simulate.predict import Point, Scene, model_error, sweep

HELP = f"""Predict step time and efficiency on other networks and with more ranks.

Starts from a profile that `torchddp tune --profile` recorded on two or more ranks; it needs no GPU and no other ranks.
The model first predicts the recorded step itself. If its error is above {report.DOUBTFUL_ERROR:.0%}, the command warns;
above {report.LARGEST_ERROR:.0%}, it stops with exit status {command.EXIT_UNSURE}, unless --force is given.

\b
Links between hosts:
  {", ".join(PRESETS)}
  measured      the link of the recording
  25gbit,15us   a rate and a latency
  25gbit        a rate; the latency as recorded

\b
Examples:
  torchddp tune --model gpt --profile gpt.json
      record a profile first
  torchddp simulate gpt.json
      networks from 1 to 400 Gbit/s, 1 to {MAX_RANKS} ranks
  torchddp simulate gpt.json --link 100mbit --ranks 2,4,8
      a slower link with the latency as recorded
  torchddp simulate gpt.json --link ib400 --ranks-per-host 8
      hosts with 8 ranks each and NVLink inside
  torchddp simulate gpt.json --plot efficiency.png --json all.json
      save a plot and the numbers
"""


def parse_ranks(text: str) -> tuple[int, ...]:
    """'8,2,8' -> (2, 8); ArgumentError for anything but numbers in range."""
    try:
        ranks = {int(part) for part in text.split(",")}
    except ValueError:
        raise ArgumentError(f"--ranks must be numbers separated by commas, like 2,8,64, not '{text}'.") from None
    if not all(1 <= count <= MAX_RANKS for count in ranks):
        raise ArgumentError(f"--ranks must be numbers from 1 to {MAX_RANKS}, not '{text}'.")
    return tuple(sorted(ranks))


def _choose_links(asked: Sequence[str], profile: StepProfile) -> list[Link]:
    if asked:
        return list({link.name: link for link in map(parse_link, asked)}.values())
    recorded = [MEASURED] if profile.world_size > 1 else []
    return [*recorded, *(PRESETS[name] for name in NETWORKS)]


def _predict(profile: StepProfile, links: Sequence[Link], ranks: Sequence[int], scene: Scene) -> list[Point]:
    # Imported late: `torchddp doctor` must start where the extension does not load.
    command.check_loads()
    from torchddp.cli.tune_run import DEFAULT_CAPS_MB, make_candidates

    candidates = make_candidates(profile, DEFAULT_CAPS_MB)
    by_cap = {candidate.cap_mb: candidate.buckets for candidate in candidates if candidate.cap_mb is not None}
    return sweep(profile, links, ranks, scene, by_cap)


def _show(profile: StepProfile, points: Sequence[Point], scene: Scene, console: Console) -> None:
    console.print(report.profile_text(profile))
    doubt = "yellow" if abs(model_error(profile) or 0.0) > report.DOUBTFUL_ERROR else ""
    warning = "warning: " if doubt else ""
    console.print(f"{warning}{report.check_text(profile)}", style=doubt)
    console.print(report.verdict(profile, points), style="bold")
    for group in report.by_link(points):
        console.print("", report.link_table(profile, group), sep="\n")
    console.print()
    for line in (line for group in report.by_link(points) for line in report.advice(profile, group)):
        if line != report.verdict(profile, points):
            console.print(line)
    for note in report.notes(profile, scene):
        console.print(note, style="dim")
    console.print(date_text(now()), style="dim")


def simulate(
    context: typer.Context,
    profile_path: Annotated[Path, typer.Argument(metavar="PROFILE", help="A file from `torchddp tune --profile`.")],
    link: Annotated[
        list[str] | None,
        typer.Option(
            autocompletion=lambda: [MEASURED.name, *PRESETS],
            help="A link between hosts, see above; repeatable. [default: measured, and all networks]",
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(help=f"Numbers of ranks, like 2,8,64. [default: the profile's, and powers of two to {MAX_RANKS}]"),
    ] = None,
    ranks_per_host: Annotated[int, typer.Option(help="Ranks that share a host and its link.")] = 1,
    inner_link: Annotated[
        str, typer.Option(autocompletion=lambda: list(PRESETS), help="The link between the ranks of a host.")
    ] = NVLINK.name,
    algorithm: Annotated[
        str, typer.Option(autocompletion=lambda: list(ALGORITHMS), help=f"How ranks reduce: {', '.join(ALGORITHMS)}.")
    ] = AUTO,
    force: Annotated[
        bool, typer.Option("--force", help=f"Predict even if the model is off by more than {report.LARGEST_ERROR:.0%}.")
    ] = False,
    json_path: command.JsonFile = None,
    plot: Annotated[Path | None, command.output_option("Write a PNG of efficiency over ranks to this file.")] = None,
) -> None:
    world_sizes = set(2**i for i in range(MAX_RANKS.bit_length())) if ranks is None else set(parse_ranks(ranks))
    Layout(1, ranks_per_host)  # checks the number
    command.check_plots("--plot", plot)
    scene = Scene(ranks_per_host, parse_link(inner_link), algorithm)
    try:
        profile = load_profile(profile_path)
    except ProfileError as error:
        raise ArgumentError(str(error)) from error
    if abs(model_error(profile) or 0.0) > report.LARGEST_ERROR and not force:
        command.report_error(
            f"{report.check_text(profile)} Record it again on an idle machine, or predict anyway with --force."
        )
        raise typer.Exit(command.EXIT_UNSURE)
    if ranks is None:
        world_sizes.add(profile.world_size)
    points = _predict(profile, _choose_links(link or (), profile), sorted(world_sizes), scene)
    console = command.make_console()
    _show(profile, points, scene, console)
    document = report.document(profile, points, scene, context.obj["command"])
    command.write_outputs(
        console,
        (json_path, lambda path: write_json(path, document)),
        (plot, lambda path: path.write_bytes(report.efficiency_png(points))),
    )
