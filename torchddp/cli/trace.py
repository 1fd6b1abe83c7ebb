"""`torchddp trace`: one step of a model, in detail, over all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchddp.cli.options import (
    MODEL_HELP,
    TRANSPORT_HELP,
    WORLD_SIZE_HELP,
    check_loads,
    check_model,
    check_outputs,
    check_transport,
    check_world_size,
    rank_console,
    run_command,
    write_json,
    write_outputs,
)
from torchddp.harness.page import PagePlot, Section, figure_png, write_page
from torchddp.harness.tables import ranks_text
from torchddp.harness.variants import ArgumentError

# torch and numpy load only when the command runs: `torchddp doctor` must start without them.
if TYPE_CHECKING:
    from torchddp.ddp.module import DistributedDataParallel
    from torchddp.profiler.ranks import MergedProfile

# Buckets are rebuilt at the second step; memory and caches are warm some steps later.
WARMUP_STEPS = 5
HELP = """Record some steps of a model on several ranks, and show the median one: in Perfetto and as text.

For each bucket: when its first and last gradient were ready, when it was packed, launched and done, which rank was last
and which parameter held it back. What was exposed, the overlap ratio, and the straggler by name.

\b
Examples:
  torchddp trace
      an MLP on two ranks of this machine; open trace.json at https://ui.perfetto.dev
  torchddp trace --model mypackage.training:make --world-size 4 --steps 50
      your model: a function that returns (module, batch) or (module, batch, loss)
  torchddp trace --model gpt --bucket-cap-mb 5 --plot step.png --html step.html
      other buckets, with a picture and a page to hand on
  torchrun --nproc-per-node 2 -m torchddp trace --model gpt
      on the ranks that torchrun started, also of several hosts
"""


@dataclass(frozen=True)
class TraceSettings:
    """What the command line asked for, checked."""

    model: str
    world_size: int
    steps: int
    bucket_cap_mb: float | None
    plan: str | None  # a file's path
    transport: str
    seed: int = 0


@dataclass(frozen=True)
class Traced:
    """What the ranks found."""

    profile: MergedProfile
    transport: str  # that moved the buckets
    device: str


def check_settings(
    model: str, world_size: int | None, steps: int, bucket_cap_mb: float | None, plan: Path | None, transport: str
) -> TraceSettings:
    """What can be said before any rank starts."""
    check_loads()
    check_model(model)
    if not 1 <= steps <= 10_000:
        raise ArgumentError(f"--steps wants 1 to 10000, not {steps}.")
    if bucket_cap_mb is not None and not 0 < bucket_cap_mb < float("inf"):
        raise ArgumentError(f"--bucket-cap-mb wants a positive number of MiB, not {bucket_cap_mb:g}.")
    if plan is not None and bucket_cap_mb is not None:
        raise ArgumentError("--plan has the buckets: leave --bucket-cap-mb out.")
    check_transport(transport)
    path = None if plan is None else str(plan)
    return TraceSettings(model, check_world_size(world_size, "to trace"), steps, bucket_cap_mb, path, transport)


def _use_kept_plan(path: Path, model: DistributedDataParallel) -> None:
    """Collective: the buckets that `torchddp tune` kept in a file, as rank 0 reads it.

    ArgumentError on all ranks if they are not for this model and group.
    """
    import torch.distributed as dist

    from torchddp import _C
    from torchddp.plan.model_plan import plan_key
    from torchddp.plan.plan_cache import load_plan

    key = plan_key(model)
    plan: _C.BucketPlan | None = None
    problem: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            buckets = load_plan(path, key)
            if buckets is None:
                raise ValueError(f"there is no file '{path}'.")
            plan = _C.BucketPlan(buckets, model._specs)
        except ValueError as error:
            problem = [f"--plan: {error}"]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise ArgumentError(problem[0])
    model.reducer.adopt_plan(plan)


def trace_rank(report: Callable[[float, float], None], settings: TraceSettings) -> Traced:
    """One rank's part, collective: some steps to warm up, then those that are recorded. Every rank returns the same."""
    from torchddp.harness.subject import make_subject
    from torchddp.profiler import profile

    subject = make_subject(
        settings.model, settings.seed, bucket_cap_mb=settings.bucket_cap_mb, transport=settings.transport
    )
    ddp = subject.model
    if settings.plan is not None:
        _use_kept_plan(Path(settings.plan), ddp)
    total = WARMUP_STEPS + settings.steps

    def step(index: int) -> None:
        subject.step(index)
        report(index + 1, total)

    for index in range(WARMUP_STEPS):
        step(index)
    with profile(ddp, steps=settings.steps) as recorded:
        for index in range(WARMUP_STEPS, total):
            step(index)
    return Traced(recorded.gather(), ddp.reducer.transport_name, ddp.device_type)


def trace(
    context: typer.Context,
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "mlp",
    world_size: Annotated[int | None, typer.Option(help=WORLD_SIZE_HELP)] = None,
    steps: Annotated[int, typer.Option(help="How many steps to record, after some to warm up.")] = 20,
    out: Annotated[Path, typer.Option(help="Where the trace of the median step goes.")] = Path("trace.json"),
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the report as JSON to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write report and picture as one page to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the picture, a PNG, to this file.")] = None,
    bucket_cap_mb: Annotated[float | None, typer.Option(help="As of the constructor. [default: its own]")] = None,
    plan: Annotated[Path | None, typer.Option(help="Buckets that `torchddp tune` kept, by their file.")] = None,
    transport: Annotated[str, typer.Option(help=TRANSPORT_HELP)] = "auto",
) -> None:
    check_outputs(out=out, json=json_path, html=html, plot=plot)
    settings = check_settings(model, world_size, steps, bucket_cap_mb, plan, transport)
    from torchddp.bench.run import new_document
    from torchddp.profiler import report
    from torchddp.profiler.export import draw, write_chrome_trace
    from torchddp.profiler.session import merged_trace

    console = rank_console()
    traced: Traced | None = run_command(
        "trace", trace_rank, settings, console, lambda done, total: f"step {done:.0f} of {total:.0f}"
    )
    if traced is None:
        return
    profile = traced.profile
    step = profile.median_step()
    document = new_document(context.obj["command"], asdict(settings))
    document["results"] = [
        {"transport": traced.transport, "device": traced.device, **report.merged_dict(profile, step)}
    ]
    title = f"{model}, {ranks_text(settings.world_size)}, {traced.device}, transport {traced.transport}"
    console.print(f"{title}\n", markup=False, emoji=False)  # a factory's path may look like either
    console.print(report.merged_report(profile))
    write_chrome_trace(out, merged_trace(profile, only_step=step.index))
    console.print(f"\nwrote {out}: open it at https://ui.perfetto.dev")

    @functools.cache
    def picture() -> bytes:
        below = "; ".join(report.sent_lines(profile.records))
        ranks = [record.rank for record in profile.records]
        return figure_png(draw(step, ranks, f"{title}: step {step.index}\n{below}"))

    write_outputs(
        console,
        (json_path, lambda path: write_json(path, document)),
        (html, lambda path: _write_page(path, title, profile, picture(), document)),
        (plot, lambda path: path.write_bytes(picture())),
    )


def _write_page(path: Path, title: str, profile: MergedProfile, png: bytes, document: dict[str, Any]) -> None:
    """The report, the picture, and the document behind them."""
    from torchddp.bench.html_report import page_table
    from torchddp.bench.report import origin
    from torchddp.profiler import report

    step = profile.median_step()
    sections = [
        Section("Where the time went", report.lines_of(profile, step)),
        Section("The step", [PagePlot(png, "Forward, backward and each bucket over time, one panel a rank")]),
        Section("Buckets", [page_table(report.bucket_table(step, profile.names, "")), report.FOOTNOTE]),
    ]
    write_page(path, f"torchddp trace: {title}", sections, [line.plain for line in origin(document)], document)
