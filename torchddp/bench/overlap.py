"""The case `overlap`: how much of the communication is hidden behind computation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from torchddp.bench import timing
from torchddp.bench.cases import ONE_CAP_MB, BenchCase, Job, one_launch
from torchddp.bench.results import added_ms, bars, describe_variant, draw_bars, model_result, variants_table
from torchddp.harness.launch import Report
from torchddp.harness.models import describe_model
from torchddp.harness.plots import COLORS
from torchddp.harness.stats import paired_ratio, summarize
from torchddp.harness.tables import number
from torchddp.harness.variants import Role, Variant

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Recorded(tuple[Tensor, ...]):
    """Gradients that deep copies of a module share."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorded:
        return self


class _HandOut(torch.autograd.Function):
    """Its backward returns all gradients at once, leaving no computation to hide a reduction behind."""

    @staticmethod
    def forward(ctx: Any, gradients: Recorded, *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _loss: Tensor) -> tuple[Tensor | None, ...]:
        # Cloned because a computed gradient owns its memory, which autograd may hand over to `.grad`.
        return None, *(gradient.clone() for gradient in ctx.gradients)


class Replay(nn.Module):
    """A model's trainable parameters and buffers with recorded gradients, and no computation."""

    def __init__(self, model: nn.Module, gradients: Iterable[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(p.detach()) for p in model.parameters() if p.requires_grad)
        for index, buffer in enumerate(model.buffers()):
            self.register_buffer(f"buffer{index}", buffer.detach().clone())
        self.recorded = Recorded(gradient.detach().clone() for gradient in gradients)

    def forward(self, *_batch: object, **_more: object) -> Tensor:
        loss: Tensor = _HandOut.apply(self.recorded, *self.weights)  # type: ignore[no-untyped-call]
        return loss


def build_replays(job: Job, runners: Sequence[timing.Runner]) -> list[timing.Runner]:
    """Build every variant around a replay of the bare model's current gradients on this rank."""
    local = next(runner for runner in runners if runner.variant.role is Role.LOCAL)
    original = Replay(local.module, (gradient for _, gradient in local.gradients()))
    return [timing.Runner(*pair) for pair in zip(job.variants, timing.wrap_copies(original, job.variants), strict=True)]


def time_overlap(job: Job, model_name: str, report: Report) -> dict[str, Any]:
    """Time steps and replays of all variants after checking their gradients. Returns the same dict on every rank."""
    batch, other_batch = timing.two_batches(job, model_name)
    runners = timing.build_runners(job, model_name)
    timing.warm_up(runners, batch, job)
    replays = build_replays(job, runners)
    timing.warm_up(replays, batch, job)

    def check() -> None:
        timing.check_gradients(job, model_name, runners, other_batch)
        timing.check_gradients(job, model_name, replays, other_batch)

    check()
    samples = timing.over_ranks(timing.timed_rounds([*runners, *replays], batch, job, report), job)
    check()
    return {
        **describe_model(model_name, runners[0].module, job.seed),
        "step_ms": samples[: len(runners)],
        "replay_ms": samples[len(runners) :],
    }


def hidden_share(exposed_ms: np.ndarray, comm_ms: np.ndarray) -> dict[str, Any]:
    """1 - exposed/comm per round; noise can take it below 0 or above 1."""
    ratio = paired_ratio(exposed_ms, comm_ms).to_dict()
    mirrored = {"q25": "q75", "q75": "q25", "ci95_low": "ci95_high", "ci95_high": "ci95_low"}
    shares = {key: ratio[mirrored.get(key, key)] for key in ratio if key not in ("rounds", "odd_rounds")}
    return ratio | {key: None if value is None else 1 - value for key, value in shares.items()}


def overlap_result(variants: Sequence[Variant], raw: dict[str, Any], world_size: int) -> dict[str, Any]:
    step_ms, replay_ms = raw["step_ms"], raw["replay_ms"]
    exposed_ms, comm_ms = added_ms(variants, step_ms), added_ms(variants, replay_ms)
    rows = []
    for index, variant in enumerate(variants):
        times = {"step_ms": step_ms, "replay_ms": replay_ms}
        hidden = {}
        if variant.role is not Role.LOCAL:
            times |= {"exposed_ms": exposed_ms, "comm_ms": comm_ms}
            hidden = {"hidden": hidden_share(exposed_ms[index], comm_ms[index])}
        summaries = {key: summarize(each[index]) for key, each in times.items()}
        rows.append({**describe_variant(variant), **summaries, **hidden})
    return model_result("overlap", raw, world_size, rows, unit="ms", rounds=int(step_ms.shape[1]))


def hidden_text(hidden: dict[str, Any]) -> str:
    """'86% [80%..91%]', clipped to 0 and 100%; '?' if the reduction alone cost nothing."""
    values = (hidden[key] for key in ("median", "q25", "q75"))
    median, q25, q75 = ("?" if value is None else f"{100 * min(max(value, 0.0), 1.0):.0f}%" for value in values)
    return f"{median} [{q25}..{q75}]"


def overlap_table(result: dict[str, Any]) -> Table:
    """Each variant's step, its exposed part, the communication alone, and the share of it that was hidden."""

    def cells(row: dict[str, Any]) -> list[str | Text]:
        step = number(row["step_ms"]["median"])
        if row["role"] == "local":
            return [step, Text("compute", style="dim")]
        exposed, comm = row["exposed_ms"], number(row["comm_ms"]["median"])
        return [step, number(exposed["median"]), number(exposed["p90"]), comm, hidden_text(row["hidden"])]

    columns = ("step p50\nms", "exposed\np50 ms", "exposed\np90", "comm alone\np50 ms", "hidden\np50 [p25..p75]")
    return variants_table(result, columns, cells)


def draw_overlap(results: Sequence[dict[str, Any]]) -> Figure:
    """One panel per model, with a pale bar for a variant's communication alone and a solid bar for the exposed part."""
    figure = draw_bars(results, "exposed_ms", "communication, ms", height=0.4)
    for axis, result in zip(figure.axes, results, strict=True):
        _, roles, heights, *_ = zip(*bars(result, "comm_ms"), strict=True)
        axis.barh(range(len(roles)), heights, color=[COLORS[r] for r in roles], alpha=0.3, label="alone", zorder=0)
    figure.axes[-1].legend(fontsize=7, frameon=False, reverse=True)
    return figure


CASE = BenchCase(
    name="overlap",
    title="how much of the communication is hidden behind computation",
    models=("gpt",),
    quick_models=("mlp",),
    seconds=15.0,
    caps_mb=ONE_CAP_MB,
    min_world_size=2,
    measure=time_overlap,
    run=partial(one_launch, overlap_result),
    table=overlap_table,
    draw=draw_overlap,
    note=(
        "overlap: compute is the bare model's step (forward and backward); exposed is what the class adds to it. comm "
        "alone is what the class adds to a step without computation, whose backward returns the same gradients all at "
        "once: hooks, packing and reduction with nothing to hide behind. hidden: 1 - exposed / comm alone, per round; "
        "the table clips it to 0 and 100%, JSON does not."
    ),
)
