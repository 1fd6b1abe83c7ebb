"""`torchddp trace`: shows one step of a model in detail, over all ranks."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.text import Text

from torchddp.harness import command
from torchddp.harness.launch import ModelSettings
from torchddp.harness.plots import figure_png
from torchddp.harness.tables import origin, ranks_text
from torchddp.harness.variants import ArgumentError

# torch and numpy load only when the command runs: `torchddp doctor` must start without them.
if TYPE_CHECKING:
    from torchddp.profiler.ranks import MergedProfile

# Buckets are rebuilt at the second step; memory and caches are warm a few steps later.
WARMUP_STEPS = 5
HELP = f"""Record some steps of a model on several ranks, and show where the time of the median step went.

For each bucket: when its first and last gradient were ready, when it was packed, launched and done, which rank was last
and which parameter held it back. For the step: how much communication was exposed, and whether a rank is a straggler,
that is, last significantly more often than the others. Open the trace at https://ui.perfetto.dev.

{command.FACTORY_HELP}

\b
Examples:
  torchddp trace
      an MLP on two ranks of this machine
  torchddp trace --model train.py:make --world-size 4 --steps 50
      your model on four ranks
  torchddp trace --model gpt --bucket-cap-mb 5 --html step.html
      other buckets, and a report to share
  torchrun --nproc-per-node 2 -m torchddp trace --model gpt
      on the ranks that torchrun started, also on several hosts
"""


@dataclass(frozen=True, kw_only=True)
class TraceSettings(ModelSettings):
    steps: int
    bucket_cap_mb: float | None


def trace_rank(report: Callable[[float, float], None], settings: TraceSettings) -> tuple[MergedProfile, str, str]:
    """Run a rank's warm-up steps, then those that are recorded. Collective.

    Returns the profile, the transport, and the device; the same on every rank.
    """
    from torchddp.harness.models import make_subject
    from torchddp.profiler import profile

    subject = make_subject(settings, settings.bucket_cap_mb)
    ddp = subject.model
    total = WARMUP_STEPS + settings.steps

    def step(index: int) -> None:
        subject.step(index)
        report(index + 1, total)

    for index in range(WARMUP_STEPS):
        step(index)
    with profile(ddp, steps=settings.steps) as recorded:
        for index in range(WARMUP_STEPS, total):
            step(index)
    return recorded.gather(), ddp.reducer.transport_name, ddp.device_type


def trace(
    context: typer.Context,
    model: command.ModelName = "mlp",
    world_size: command.WorldSize = None,
    steps: Annotated[int, typer.Option(help="Steps to record, after a few to warm up.")] = 20,
    out: Annotated[Path, command.output_option("Write the median step's trace to this file.")] = Path("trace.json"),
    json_path: command.JsonFile = None,
    html: Annotated[
        Path | None, command.output_option("Write the report and its picture as an HTML page to this file.")
    ] = None,
    plot: Annotated[Path | None, command.output_option("Write a PNG of the step to this file.")] = None,
    bucket_cap_mb: Annotated[
        float | None, typer.Option(help="bucket_cap_mb, in MiB. [default: the constructor's]")
    ] = None,
    transport: command.TransportName = "auto",
    find_unused_parameters: command.FindUnusedParameters = False,
) -> None:
    if not 1 <= steps <= 10_000:
        raise ArgumentError(f"--steps must be 1 to 10000, not {steps}.")
    if bucket_cap_mb is not None and not 0 < bucket_cap_mb < float("inf"):
        raise ArgumentError(f"--bucket-cap-mb must be a positive number of MiB, not {bucket_cap_mb:g}.")
    ranks = command.check_world_size(world_size, "to trace")
    settings = TraceSettings(
        model=model,
        world_size=ranks,
        transport=transport,
        find_unused_parameters=find_unused_parameters,
        steps=steps,
        bucket_cap_mb=bucket_cap_mb,
    )
    from torchddp.harness.machine import new_document, write_json
    from torchddp.profiler import report
    from torchddp.profiler.export import draw, write_chrome_trace
    from torchddp.profiler.session import merged_trace

    console = command.rank_console()
    traced: tuple[MergedProfile, str, str] | None = command.run_command(
        "trace", trace_rank, settings, console, lambda done, total: f"step {done:.0f} of {total:.0f}"
    )
    if traced is None:
        return
    profile, used_transport, device = traced
    step = profile.median_step()
    document = new_document(context.obj["command"], asdict(settings))
    document["verdict"] = report.verdict(profile, step)
    document["results"] = [{"transport": used_transport, "device": device, **report.merged_dict(profile, step)}]
    title = f"{model}, {ranks_text(settings.world_size)}, {device}, transport {used_transport}"
    console.print(f"{title}\n")
    shown = Group(report.merged_report(profile), Text(f"\n{document['verdict']}", "bold"), next(origin(document)))
    console.print(shown)
    write_chrome_trace(out, merged_trace(profile, only_step=step.index))
    console.print(f"wrote {out}: open it at https://ui.perfetto.dev", soft_wrap=True)

    @functools.cache
    def picture() -> bytes:
        below = "; ".join(report.sent_lines(profile.records))
        ranks = [record.rank for record in profile.records]
        return figure_png(draw(step, ranks, f"{title}: step {step.index}\n{below}"))

    def write_html(path: Path) -> None:
        page = Console(record=True, file=io.StringIO(), width=report.WIDTH)
        page.print(Text(f"torchddp trace: {title}\n", "bold"), shown, Text(document["command"]), highlight=False)
        image = f'<img alt="each bucket over time" src="data:image/png;base64,{base64.b64encode(picture()).decode()}">'
        path.write_text(page.export_html(inline_styles=True).replace("</body>", f"{image}\n</body>"))

    command.write_outputs(
        console,
        (json_path, lambda path: write_json(path, document)),
        (html, write_html),
        (plot, lambda path: path.write_bytes(picture())),
    )
