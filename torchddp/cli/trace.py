"""`torchddp trace`: shows one step of a model in detail, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from torchddp.harness import command
from torchddp.harness.launch import ModelSettings
from torchddp.harness.plots import figure_png
from torchddp.harness.tables import (
    counted,
    interval_text,
    is_known,
    load_warning,
    number,
    origin,
    ranks_text,
    ratio_sign,
)
from torchddp.harness.variants import ArgumentError

# torch and numpy load only when the command runs: `torchddp doctor` must start without them.
if TYPE_CHECKING:
    from torchddp import _C
    from torchddp.harness.models import Subject
    from torchddp.profiler.ranks import MergedProfile

# Buckets are rebuilt at the second step; memory and caches are warm a few steps later.
WARMUP_STEPS = 5
# With --compare: each plan's consecutive steps. The first one touches new memory, so only the last one counts.
STEPS_OF_PLAN = 2
MAX_STEPS = 10_000
HELP = f"""Record some steps of a model on several ranks, and show where the time of the median step went.

For each bucket: when its first and last gradients were ready, when it was packed, launched and done, which rank was
last and which parameter held it back. For the step: how much communication was exposed, and whether a rank is a
straggler, that is, last significantly more often than the others. --html writes a page with all steps to share. Open
the file that --out writes at https://ui.perfetto.dev.

--compare A B alternates between two plans in one run; each is a bucket size in MiB, default or auto. It reports the
ratio of their step times with its 95% interval.

{command.FACTORY_HELP}

\b
Examples:
  torchddp trace
      an MLP on two ranks of this machine
  torchddp trace --model train.py:make --world-size 4 --steps 50
      your model on four ranks
  torchddp trace --model gpt --bucket-cap-mb 5 --html step.html
      other buckets, and a page to share
  torchddp trace --model gpt --compare default 5 --html both.html
      two bucket sizes side by side
  torchrun --nproc-per-node 2 -m torchddp trace --model gpt
      on ranks that torchrun started, on one host or several
"""


# Plans whose steps differ by less are the same for practical purposes.
SAME = 0.02
DEFAULT, AUTO = "default", "auto"


@dataclass(frozen=True, kw_only=True)
class TraceSettings(ModelSettings):
    steps: int
    bucket_cap_mb: float | None
    compare: tuple[str, str] | None = None


@dataclass(frozen=True)
class Traced:
    """`runs`: the plan's name, empty if there is only one, and its profile."""

    runs: tuple[tuple[str, MergedProfile], ...]
    transport: str
    device: str


def trace_rank(report: Callable[[float, float], None], settings: TraceSettings) -> Traced:
    """Run a rank's warm-up steps, then those that are recorded. Collective; the same result on every rank."""
    from torchddp.harness.models import make_subject
    from torchddp.profiler import profile

    subject = make_subject(settings, settings.bucket_cap_mb)
    ddp, done = subject.model, 0
    total = WARMUP_STEPS + settings.steps * (1 if settings.compare is None else 2 * STEPS_OF_PLAN)

    def step() -> None:
        nonlocal done
        subject.step(done)
        done += 1
        report(done, total)

    for _ in range(WARMUP_STEPS):
        step()
    if settings.compare is None:
        with profile(ddp, steps=settings.steps) as recorded:
            for _ in range(settings.steps):
                step()
        return Traced((("", recorded.gather()),), ddp.reducer.transport_name, ddp.device_type)
    plans = _plans(subject, settings.compare, lambda: subject.step(0))
    kept: tuple[list[int], list[int]] = ([], [])
    with profile(ddp, steps=total) as recorded:
        for pair in range(settings.steps):
            for which in (pair % 2, 1 - pair % 2):
                ddp.reducer.adopt_plan(plans[which])
                for _ in range(STEPS_OF_PLAN):
                    step()
                kept[which].append(ddp.reducer.stats()["iteration"])
    profile_of_all = recorded.gather()
    steps = {each.index: each for each in profile_of_all.steps}
    pairs = [pair for pair in zip(*kept, strict=True) if steps.keys() >= set(pair)]
    runs = [replace(profile_of_all, steps=tuple(steps[pair[which]] for pair in pairs)) for which in (0, 1)]
    names = (f"{name} MiB" if name not in (DEFAULT, AUTO) else name for name in settings.compare)
    return Traced(tuple(zip(names, runs, strict=True)), ddp.reducer.transport_name, ddp.device_type)


def _plans(subject: Subject, names: Sequence[str], step: Callable[[], None]) -> list[_C.BucketPlan]:
    from torchddp import _C
    from torchddp.cli.tune_run import make_candidates
    from torchddp.plan.record_profile import record_profile

    profile = record_profile(subject.model, step)
    plans = []
    for name in names:
        caps_mb = () if name in (DEFAULT, AUTO) else (float(name),)
        candidate = make_candidates(profile, caps_mb)[{DEFAULT: 0, AUTO: 1}.get(name, 2)]
        plans.append(_C.BucketPlan(candidate.buckets, subject.model.session.specs))
    return plans


def compare(runs: Sequence[tuple[str, MergedProfile]]) -> dict[str, Any]:
    """The second plan's steps compared with the first's, pair by pair. A step is that of its slowest rank."""
    from torchddp.harness.stats import paired_ratio

    first, second = ([step.duration_ns for step in profile.steps] for _, profile in runs)
    return {"plans": [name for name, _ in runs], "ratio": paired_ratio(second, first).to_dict()}


def comparison_text(found: dict[str, Any], median_ms: Sequence[float], steps: int) -> str:
    (a, b), ratio = found["plans"], found["ratio"]
    times = f"median steps {number(median_ms[0])} and {number(median_ms[1])} ms"
    measured = f"{ratio['median']:.2f} of its step, {interval_text(ratio)}, {counted(ratio['rounds'], 'pair')} of steps"
    sign = ratio_sign(ratio)
    if sign:
        share = abs(1 - ratio["median"])
        return f"{b} takes {share:.0%} {'more' if sign > 0 else 'less'} time than {a} ({measured}; {times})."
    if is_known(ratio) and 1 - SAME <= ratio["ci95_low"] and ratio["ci95_high"] <= 1 + SAME:
        return f"{a} and {b} take the same time, to within {SAME:.0%} ({measured}; {times})."
    why = "Too noisy" if is_known(ratio) else "Too few steps"
    more = f"try --steps {min(MAX_STEPS, 4 * max(steps, 5))} on an idle machine"
    return f"{why} to tell whether {a} or {b} is faster ({b} against {a}: {measured}; {times}): {more}."


def trace(
    context: typer.Context,
    model: command.ModelName = "mlp",
    world_size: command.WorldSize = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps to record, after a few to warm up.")] = 20,
    out: Annotated[Path, command.output_option("Write the median step's trace to this file.")] = Path("trace.json"),
    json_path: command.JsonFile = None,
    html: Annotated[
        Path | None, command.output_option("Write a page with the report and a picture of every step to this file.")
    ] = None,
    plot: Annotated[Path | None, command.output_option("Write a PNG of the step to this file.")] = None,
    bucket_cap_mb: Annotated[
        float | None, typer.Option(metavar="MIB", help="bucket_cap_mb, in MiB. [default: the class's]")
    ] = None,
    compare_plans: Annotated[
        tuple[str, str] | None,
        typer.Option("--compare", metavar="A B", help="Alternate between two plans: sizes in MiB, default or auto."),
    ] = None,
    transport: command.TransportName = "auto",
    find_unused_parameters: command.FindUnusedParameters = False,
) -> None:
    if not 1 <= steps <= MAX_STEPS:
        raise ArgumentError(f"--steps must be 1 to {MAX_STEPS}, not {steps}.")
    if bucket_cap_mb is not None:
        command.parse_cap(str(bucket_cap_mb), "--bucket-cap-mb")
    if compare_plans is not None:
        if bucket_cap_mb is not None:
            raise ArgumentError("--compare names both plans: leave --bucket-cap-mb out.")
        for plan in compare_plans:
            if plan not in (DEFAULT, AUTO):
                command.parse_cap(plan, "--compare", f", {DEFAULT} or {AUTO}")
    command.check_plots("--plot", plot)
    settings = TraceSettings(
        model=model,
        world_size=command.check_world_size(world_size, "to trace"),
        transport=transport,
        find_unused_parameters=find_unused_parameters,
        steps=steps,
        bucket_cap_mb=bucket_cap_mb,
        compare=compare_plans,
    )
    from torchddp.profiler.export import chrome_trace, draw, write_chrome_trace
    from torchddp.profiler.numbers import profile_numbers
    from torchddp.profiler.page import page
    from torchddp.profiler.report import report

    console = command.rank_console()
    traced: Traced | None = command.run_command(
        context, trace_rank, settings, console, lambda done, total: f"step {done:.0f} of {total:.0f}", json_path
    )
    if traced is None:
        return
    about = {"transport": traced.transport, "device": traced.device}
    found = [{"plan": name, **about, **profile_numbers(profile)} for name, profile in traced.runs]
    document = command.document_of(context, settings, results=found, verdict=found[0]["verdict"])
    title = f"{model}, {ranks_text(settings.world_size)}, {traced.device}, transport {traced.transport}"
    if settings.compare is not None:
        found[1]["comparison"] = compare(traced.runs)
        medians = [each["step_us"] / 1e3 for each in found]
        document["verdict"] = comparison_text(found[1]["comparison"], medians, steps)
    console.print(title)
    for each in found:
        console.print("", *([each["plan"]] if each["plan"] else []), report(each), sep="\n")
    busy = load_warning(document["machine"])
    console.print(Text(f"\n{document['verdict']}", "bold"), next(origin(document)), sep="\n")
    for line in busy:
        console.print(line, style="yellow")

    def write_trace(path: Path) -> None:
        chosen = {each["step"]: each["plan"] for each in found}
        steps = [step for _, profile in traced.runs for step in profile.steps if step.index in chosen]
        trace = chrome_trace(traced.runs[0][1], steps)
        trace["otherData"]["plan_of_step"] = chosen
        write_chrome_trace(path, trace)

    plan = f"{found[0]['plan']}, " if found[0]["plan"] else ""

    def write_html(path: Path) -> None:
        lines = [*busy, *(text.plain for text in origin(document))]
        text = page(f"torchddp trace: {title}", document["verdict"], traced.runs, lines)
        path.write_text(text, encoding="utf-8", errors="surrogateescape")  # UTF-8, as it says; names as in the shell

    command.write_outputs(
        console,
        document,
        json_path,
        (out, write_trace),
        (html, write_html),
        (plot, lambda path: path.write_bytes(figure_png(draw(found[0], f"{title}: {plan}step {found[0]['step']}")))),
    )
    console.print(f"Open {out} at https://ui.perfetto.dev.", soft_wrap=True)
