"""`torchddp simulate`: predicts a recorded step on other networks and with more ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from torchddp.harness import command
from torchddp.harness.machine import date_text, now
from torchddp.harness.plots import figure_png, finish_panel, panels
from torchddp.harness.tables import bytes_text, counted, number, plain_table, ranks_text
from torchddp.harness.variants import ArgumentError
from torchddp.plan.step_profile import ProfileError, StepProfile, load_profile
from torchddp.simulate import network
from torchddp.simulate.predict import MIN_GAIN, Point, Prediction, Scene, make_point, model_error

# The model's error on the recorded step: above the first limit, warn; above the second, predict nothing.
DOUBTFUL_ERROR, LARGEST_ERROR = 0.15, 0.40
# If messages in a step take this many times longer than alone, something else kept the machine busy.
BUSY_SLOWDOWN = 3.0
_HEADINGS = ("ranks", "step\nms", "exposed\nms", "effi-\nciency", "algorithm", "best plan\nbuckets", "step\nms", "gain")
DEFAULT_RANKS = (1, 2, 8, 64, 512, network.MAX_RANKS)
# List the sizes of this many buckets.
_SPELLED_OUT = 4

HELP = f"""Predict step time and efficiency on other networks and with more ranks.

Starts from a profile that `torchddp tune --profile` recorded on two or more ranks; it needs no GPU and no other ranks.
The model first predicts the recorded step itself. If its error is above {DOUBTFUL_ERROR:.0%}, the command warns;
above {LARGEST_ERROR:.0%}, it stops with exit status {command.EXIT_UNSURE}, unless --force is given.

\b
Links between hosts:
  {", ".join(network.PRESETS)}
  measured      the link of the recording
  25gbit,15us   a rate and a latency
  25gbit        a rate; the latency as recorded

\b
Examples:
  torchddp tune --model gpt --profile gpt.json
      record a profile first
  torchddp simulate gpt.json
      networks from 1 to 400 Gbit/s, 1 to {network.MAX_RANKS} ranks
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
    if not all(1 <= count <= network.MAX_RANKS for count in ranks):
        raise ArgumentError(f"--ranks must be numbers from 1 to {network.MAX_RANKS}, not '{text}'.")
    return tuple(sorted(ranks))


def _within_reach(link: network.Link, world_size: int, profile: StepProfile) -> bool:
    """Shared memory, which a profile may have measured, reaches no other hosts."""
    return link is not network.MEASURED or profile.transport != "shm" or world_size <= profile.world_size


def _choose_links(asked: Sequence[str], profile: StepProfile) -> list[network.Link]:
    if asked:
        return list({link.name: link for link in map(network.parse_link, asked)}.values())
    recorded = [network.MEASURED] if profile.world_size > 1 else []
    return [*recorded, *(link for link in network.PRESETS.values() if link is not network.NVLINK)]


def _predict(profile: StepProfile, links: Sequence[network.Link], ranks: Sequence[int], scene: Scene) -> list[Point]:
    # Imported late: `torchddp doctor` must start where the extension does not load.
    command.check_loads()
    from torchddp.cli.tune_run import DEFAULT_CAPS_MB, make_candidates

    candidates = make_candidates(profile, DEFAULT_CAPS_MB)
    by_cap = {candidate.cap_mb: candidate.buckets for candidate in candidates if candidate.cap_mb is not None}
    pairs = [(link, world_size) for link in links for world_size in ranks if _within_reach(link, world_size, profile)]
    return [make_point(profile, link, world_size, scene, by_cap) for link, world_size in pairs]


def _show(profile: StepProfile, points: Sequence[Point], scene: Scene, console: Console) -> None:
    console.print(profile_text(profile))
    doubt = "yellow" if abs(model_error(profile) or 0.0) > DOUBTFUL_ERROR or was_busy(profile) else ""
    console.print(f"{'warning: ' if doubt else ''}{check_text(profile)}", style=doubt)
    console.print(verdict(profile, points), style="bold")
    for group in by_link(points):
        console.print("", link_table(profile, group), sep="\n")
    console.print()
    for line in advice(profile, points):
        if line != verdict(profile, points):
            console.print(line)
    for note in notes(profile, scene):
        console.print(note, style="dim")
    console.print(date_text(now()), style="dim")


def simulate(
    context: typer.Context,
    profile_path: Annotated[
        Path,
        typer.Argument(metavar="PROFILE", callback=command.named_once, help="A file from `torchddp tune --profile`."),
    ],
    link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LINK",
            autocompletion=lambda: [network.MEASURED.name, *network.PRESETS],
            help="A link between hosts, see above; repeatable. [default: measured, and all networks]",
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help=f"Numbers of ranks. [default: the profile's, and {','.join(map(str, DEFAULT_RANKS))}]",
        ),
    ] = None,
    ranks_per_host: Annotated[int, typer.Option(metavar="N", help="Ranks that share a host and its link.")] = 1,
    inner_link: Annotated[
        str,
        typer.Option(
            metavar="LINK", autocompletion=lambda: list(network.PRESETS), help="The link between the ranks of a host."
        ),
    ] = network.NVLINK.name,
    algorithm: Annotated[
        str,
        typer.Option(
            metavar="ALGORITHM",
            autocompletion=lambda: list(network.ALGORITHMS),
            help=f"How ranks reduce: {', '.join(network.ALGORITHMS)}.",
        ),
    ] = network.AUTO,
    force: Annotated[
        bool, typer.Option("--force", help=f"Predict even if the model is off by more than {LARGEST_ERROR:.0%}.")
    ] = False,
    json_path: command.JsonFile = None,
    plot: Annotated[Path | None, command.output_option("Write a PNG of efficiency over ranks to this file.")] = None,
) -> None:
    world_sizes = {*DEFAULT_RANKS} if ranks is None else set(parse_ranks(ranks))
    network.Layout(1, ranks_per_host)  # checks the number
    command.check_plots("--plot", plot)
    scene = Scene(ranks_per_host, network.parse_link(inner_link), algorithm)
    try:
        profile = load_profile(profile_path)
    except ProfileError as error:
        raise ArgumentError(str(error)) from error
    if abs(model_error(profile) or 0.0) > LARGEST_ERROR and not force:
        why = f"{check_text(profile)} Record it again on an idle machine, or predict anyway with --force."
        command.write_failure(json_path, context, scene, why)
        command.report_error(why)
        raise typer.Exit(command.EXIT_UNSURE)
    if ranks is None:
        world_sizes.add(profile.world_size)
    links = _choose_links(link or (), profile)
    if link and ranks and not all(_within_reach(each, most := max(world_sizes), profile) for each in links):
        raise ArgumentError(
            f"The profile was recorded by {ranks_text(profile.world_size)} over shared memory, which reaches no other "
            f"host: choose another --link for {most}."
        )
    points = _predict(profile, links, sorted(world_sizes), scene)
    console = command.make_console()
    _show(profile, points, scene, console)
    found = results(profile, points)
    document = command.document_of(context, scene, verdict=verdict(profile, points), results=[found])
    picture = (plot, lambda path: path.write_bytes(efficiency_png(points)))
    command.write_outputs(console, document, json_path, picture)


# --- the report, in the terminal, as a plot and as JSON ---


def _ms(seconds: float) -> str:
    return number(seconds * 1e3)


def by_link(points: Sequence[Point]) -> list[list[Point]]:
    names = dict.fromkeys(point.link.name for point in points)
    return [[point for point in points if point.link.name == name] for name in names]


def cells(point: Point) -> list[str]:
    recorded, best = point.recorded, point.best
    row = [str(point.world_size), _ms(recorded.step_s), _ms(recorded.exposed_s), f"{recorded.efficiency:.1%}"]
    if point.world_size == 1:
        return [*row, "", "", "", ""]
    if not point.is_worth_changing:
        return [*row, recorded.algorithm, "as recorded", "", ""]
    return [*row, recorded.algorithm, str(len(best.buckets)), _ms(best.step_s), f"{point.gain:.1%}"]


def link_table(profile: StepProfile, points: Sequence[Point]) -> Table:
    link = points[0].link
    table = plain_table(f"{link.name} · {link.title}", *_HEADINGS)
    table.columns[_HEADINGS.index("algorithm")].justify = "left"
    for point in points:
        style = "bold" if point.world_size == profile.world_size else None
        table.add_row(*cells(point), style=style)
    return table


def profile_text(profile: StepProfile) -> str:
    return (
        f"{profile.model}: {bytes_text(profile.gradient_bytes)} in {counted(len(profile.gradients), 'gradient')}, "
        f"recorded with {ranks_text(profile.world_size)} ({profile.transport}, {profile.device}), "
        f"step {_ms(profile.step_s)} ms, {counted(len(profile.buckets), 'bucket')}"
    )


def _sizes_text(profile: StepProfile, best: Prediction) -> str:
    sizes = [bytes_text(sum(profile.gradients[i].nbytes for i in bucket)) for bucket in best.buckets]
    shown = ", ".join(sizes[:_SPELLED_OUT])
    return f"{shown}{', ...' if len(sizes) > _SPELLED_OUT else ''}{' in launch order' if len(sizes) > 1 else ''}"


def advice(profile: StepProfile, points: Sequence[Point]) -> list[str]:
    """What to change on each link, for the recorded and the largest number of ranks."""
    found = []
    for group in by_link(points):
        sizes = {profile.world_size, max(point.world_size for point in group)}
        found += [_advice(profile, p) for p in group if p.world_size in sizes and p.is_worth_changing]
    return found


def _advice(profile: StepProfile, point: Point) -> str:
    recorded, best = point.recorded, point.best
    where = f"{point.link.name}, {ranks_text(point.world_size)}"
    if point.world_size == 1:
        return f"{where}: nothing is sent, so any plan will do."
    if not point.is_worth_changing:
        count = counted(len(recorded.buckets), "bucket")
        kept = f"{where}: keep the recorded plan ({count}), because the model finds none that saves {MIN_GAIN:.1%}"
        return (
            f"{kept}. If you ran tune on this machine, trust its measurements more."
            if point.link == network.MEASURED
            else f"{kept}."
        )
    count, cap = counted(len(best.buckets), "bucket"), f"bucket_cap_mb={point.best_cap_mib:g}"
    saved = f"{point.gain:.1%} of the step, {_ms(recorded.step_s)} -> {_ms(best.step_s)} ms"
    if point.capped.buckets == best.buckets:
        return f"{where}: {cap} saves {saved} ({count} instead of {len(recorded.buckets)})."
    return (
        f"{where}: {count} ({_sizes_text(profile, best)}) instead of {len(recorded.buckets)} would save {saved}; "
        f"with {cap} it takes {_ms(point.capped.step_s)} ms."
    )


def check_text(profile: StepProfile) -> str:
    """How well the model predicts the recorded step, the only one whose time is known."""
    error = model_error(profile)
    if error is None:
        why = "with one rank" if profile.world_size == 1 else "without a measured step"
        return f"The model's error is unknown: the profile was recorded {why}."
    text = (
        f"The model predicts {_ms(profile.step_s * (1 + error))} ms for the recorded step, which took "
        f"{_ms(profile.step_s)} ms ({error:+.1%})."
    )
    if abs(error) > LARGEST_ERROR:
        return f"{text} None of its predictions for this profile can be trusted."
    if abs(error) > DOUBTFUL_ERROR:
        text += " Expect errors of this size in all predictions below."
    if was_busy(profile):
        text += (
            f" Don't trust the predictions: messages in that step took {profile.message_slowdown:.1f} times as long as "
            "alone, so the machine was probably busy. Record the profile again on an idle machine."
        )
    return text


def was_busy(profile: StepProfile) -> bool:
    """Whether something else kept the machine busy, which the model has taken for a cost of every message."""
    return profile.message_slowdown > BUSY_SLOWDOWN


def verdict(profile: StepProfile, points: Sequence[Point]) -> str:
    """The result in a sentence: the best plan for the recorded number of ranks, or else for the first point."""
    return _advice(profile, next((p for p in points if p.world_size == profile.world_size), points[0]))


def notes(profile: StepProfile, scene: Scene) -> list[str]:
    found = []
    if profile.world_size == 1:
        found.append("Recorded with one rank: the cost of the transport's software is unknown and counts as zero.")
    elif not any(network.software_of(profile, as_recorded=False)):
        found.append(
            "The profile lacks the cost of the transport's software: links faster than the recorded one look too good."
        )
    hosts = f"{ranks_text(scene.ranks_per_host)} per host"
    inner = f", over {scene.inner.name} inside it" if scene.ranks_per_host > 1 else ""
    if scene.algorithm == network.AUTO and network.runs_on_cpu(profile):
        found.append(
            f"No trees, because the profile was recorded over {profile.transport}, which has none: with many ranks, "
            "--algorithm tree shows what NCCL's would save."
        )
    found.append(
        f"{hosts}{inner}; all-reduce: {scene.algorithm}. Efficiency is the step time without communication, divided by "
        f"the step time. As recorded: no other plan saves {MIN_GAIN:.1%} of the step. bucket_cap_mb='auto' plans for "
        "the link that the job runs on. Slow or failing ranks, and other traffic on the link, are not modeled."
    )
    return found


def efficiency_png(points: Sequence[Point]) -> bytes:
    figure, ((axis,),) = panels(1, 1, 8.0, 4.5)
    for group in by_link(points):
        group = sorted(group, key=lambda point: point.world_size)
        ranks = [point.world_size for point in group]
        (line,) = axis.plot(
            ranks, [p.best.efficiency for p in group], marker="o", markersize=3, label=group[0].link.name
        )
        axis.plot(ranks, [p.recorded.efficiency for p in group], linestyle=":", color=line.get_color())
    ticks = sorted({point.world_size for point in points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=8)
    axis.minorticks_off()
    axis.set_ylim(0, 1.05)
    finish_panel(axis, "best plan (lines) and recorded plan (dotted)", "ranks", "efficiency (compute alone / step)")
    axis.legend(fontsize=8, frameon=False)
    return figure_png(figure)


def results(profile: StepProfile, points: Sequence[Point]) -> dict[str, Any]:
    """For JSON. Buckets hold indices into `gradients`."""
    return {
        "model": profile.model,
        "fingerprint": profile.fingerprint,
        "gradients": [gradient.name for gradient in profile.gradients],
        "recorded_world_size": profile.world_size,
        "recorded_step_s": profile.step_s,
        "model_error": model_error(profile),
        "advice": advice(profile, points),
        "points": [{**asdict(point), "gain": point.gain} for point in points],
    }
