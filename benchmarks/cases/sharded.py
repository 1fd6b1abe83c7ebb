"""The cases `sharded`, `sharded_memory`, `muon`, `muon_memory`: training steps with sharded optimizers, by package.

Whole training steps with AdamW, or with Muon for the hidden matrices and AdamW for the rest, of torch, of torchddp, and
of fairscale and deepspeed where they are installed (`make peers` creates an environment with them).
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.table import Table
from rich.text import Text
from torch import Tensor

from benchmarks import newton_schulz
from benchmarks.options import one_of, several, whole_number
from benchmarks.sharded_trainers import ADAMW, MUON, Builder, Trainer, storage_bytes
from torchddp.bench.cases import BenchCase, Job, Option, Result, Settings
from torchddp.bench.memory import ALLOCATOR_ENVIRONMENT, parse_bytes, pay_fixed_costs, reset_peak
from torchddp.bench.results import compared_rows, draw_bars, model_result, variants_table
from torchddp.bench.timing import over_ranks, timed_rounds, warm_up
from torchddp.harness.command import MAX_WORLD_SIZE, Display
from torchddp.harness.launch import Place, Report
from torchddp.harness.models import describe_model, find_model, make_batch, make_model, run_forward
from torchddp.harness.stats import paired_ratio, summarize
from torchddp.harness.tables import MB, number, ratio_text
from torchddp.harness.variants import Role, Variant

# All others must train like it.
REFERENCE = "torch-ddp"
PROOF_STEPS = 3
# Relative to a parameter's change by training. AdamW's steps depend on a gradient's sign but little on its size, so
# where a gradient is only rounding noise (as for key biases in attention), different rounding gives different steps:
# 1.4e-3 after four GPT steps between plain and fused AdamW on two ranks. Unrequested clipping gives 6e-3 after three,
# so the tolerance must stay below that; a wrong average gives errors near one.
TOLERANCE = 5e-3
# Muon's Newton-Schulz amplifies rounding: after four GPT steps, matrices of packages or of four ranks that round
# differently are 2e-5 apart in float32, and 2.3e-2 in bfloat16.
BFLOAT16_TOLERANCE = 5e-2
WARMUP_STEPS, MEASURED_STEPS = 4, 3
MEMORY_KEYS = ("parameter_bytes", "gradient_bytes", "state_bytes", "pss_bytes", "peak_bytes")


def role_of(name: str) -> Role:
    return Role.OURS if name.startswith("torchddp") else Role.TORCH if name.startswith(("torch", "fsdp")) else Role.PEER


@dataclass(frozen=True)
class Lineup:
    """The variants of a case and its memory case, and their option."""

    builders: Mapping[str, Builder]
    quick: tuple[str, ...]
    # Whether ours must equal the reference bit for bit with two ranks, whose gradients have the same sum in any order.
    exact: bool = False

    @property
    def variants(self) -> dict[str, Variant]:
        return {name: Variant(name, role_of(name)) for name in self.builders}

    @property
    def options(self) -> dict[str, Option]:
        words = f"Some of {', '.join(self.builders)}; {REFERENCE} always runs."
        return {"variants": Option(tuple(self.builders), several(one_of(self.builders)), words, self.quick)}

    def chosen(self, job: Job) -> tuple[Variant, ...]:
        return tuple(
            variant for name, variant in self.variants.items() if name in (REFERENCE, *job.options["variants"])
        )


LINEUPS = {
    "sharded": Lineup(ADAMW, (REFERENCE, "torch-zero", "fsdp2", "torchddp-auto")),
    "muon": Lineup(MUON, (REFERENCE, "fsdp2", "torchddp-auto"), exact=True),
}


def lineup_of(case: str) -> Lineup:
    return LINEUPS[case.removesuffix("_memory")]


# --- on a rank: time -------------------------------------------------------------------------------------------------


class WrongTrainingError(RuntimeError):
    """One of our variants fails, or trains to different weights than the reference, so its time is meaningless."""


def first_problem(attempt: Callable[[], object]) -> str | None:
    """Collective: the error of the first rank that had one; None on all ranks if none had."""
    mine: str | None = None
    try:
        attempt()
    except ModuleNotFoundError as error:
        mine = f"{error.name} is not installed"
    except Exception as error:  # a peer may raise anything
        mine = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    by_rank: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, mine)
    return next((text for text in by_rank if text is not None), None)


def error_of(got: Sequence[Tensor], want: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    """The largest error of a parameter relative to its change by training (in norms); nan counts as infinite."""
    worst = 0.0
    for mine, reference, first in zip(got, want, start, strict=True):
        change = float(torch.linalg.vector_norm(reference - first))
        error = float(torch.linalg.vector_norm(mine - reference)) / max(change, 1e-12)
        worst = max(worst, error if error == error else float("inf"))
    return worst


@dataclass
class Contest:
    """All variants of one model in this process group, and those left out, each with the reason."""

    job: Job
    model: str
    report: Report
    trainers: dict[str, Trainer] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def try_to(self, name: str, attempt: Callable[[], object]) -> bool:
        """Run it on all ranks and return whether it worked; otherwise leave the variant out."""
        reason = first_problem(attempt)
        if reason:
            self.drop(name, reason)
        return not reason

    def drop(self, name: str, reason: str) -> None:
        """Leave a peer out; for our variants and the reference, raise an error."""
        if role_of(name) is Role.OURS or name == REFERENCE:
            raise WrongTrainingError(f"'{name}' on model '{self.model}': {reason}")
        self.left_out[name] = reason
        self.trainers.pop(name, None)

    def build_all(self) -> None:
        original = make_model(self.model, self.job.seed)

        def build(name: str) -> None:
            self.trainers[name] = lineup_of(self.job.case).builders[name](copy.deepcopy(original))
            self.trainers[name].loss = find_model(self.model, self.job.seed).loss

        for variant in self.job.variants:
            self.try_to(variant.name, partial(build, variant.name))

    def train(self, steps: int, first_batch: int) -> None:
        """Train every variant for `steps` steps, each on this rank's next batch."""
        for index in range(first_batch, first_batch + steps):
            batch = make_batch(self.model, self.job.seed, dist.get_rank(), index)
            for name, trainer in tuple(self.trainers.items()):
                self.try_to(name, partial(trainer.step, batch))
                self.report(0.0, self.job.seconds)

    def compare(self, start: list[Tensor]) -> None:
        """Compare all variants' parameters with the reference's, on the worst rank."""
        want = self.trainers[REFERENCE].full_parameters()
        for name, trainer in tuple(self.trainers.items()):
            by_rank: list[float] = [0.0] * dist.get_world_size()
            dist.all_gather_object(by_rank, error_of(trainer.full_parameters(), want, start))
            if (error := max(by_rank)) > self.tolerance(name):
                self.drop(name, f"trains to different weights: off by {error:.2g} of the change by training")

    def tolerance(self, name: str) -> float:
        if lineup_of(self.job.case).exact and self.job.world_size == 2 and role_of(name) is Role.OURS:
            return 0.0
        return BFLOAT16_TOLERANCE if self.job.options.get("newton_schulz") == "bfloat16" else TOLERANCE

    def scale_learning_rates(self, factor: float) -> None:
        for trainer in self.trainers.values():
            trainer.scale_learning_rates(factor)


def time_training(job: Job, model: str, report: Report) -> dict[str, Any]:
    """Times of the steps and updates of all variants on one model, of the slowest rank. The same on every rank.

    During timing the learning rates are zero: the work is the same, but weights and gradients do not drift toward
    values that are slow to compute with. Training continues afterwards, and must still agree.
    """
    prepare(job)
    contest = Contest(job, model, report)
    original = make_model(model, job.seed)
    start = [p.detach().clone() for p in original.parameters()]
    contest.build_all()
    contest.train(PROOF_STEPS, first_batch=0)
    contest.compare(start)
    contest.scale_learning_rates(0.0)
    batch = make_batch(model, job.seed, dist.get_rank(), 0)
    timed = dict(contest.trainers)
    warm_up(list(timed.values()), batch, job, report)
    samples = over_ranks(timed_rounds(list(timed.values()), batch, job, report))
    contest.compare(start)
    contest.scale_learning_rates(1.0)
    contest.train(1, first_batch=PROOF_STEPS)
    contest.compare(start)
    step_ms, update_ms = (
        {name: row for name, row in zip(timed, rows, strict=True) if name in contest.trainers} for rows in samples
    )
    times = {"step_ms": step_ms, "update_ms": update_ms}
    return {**describe_model(model, original, job.seed), **times, "left_out": contest.left_out}


def prepare(job: Job) -> None:
    if dtype := job.options.get("newton_schulz"):
        newton_schulz.use(getattr(torch, dtype))


# --- on a rank: memory -----------------------------------------------------------------------------------------------


def resident() -> tuple[int, int]:
    """Of this process: private memory and its share of shared memory (Pss), and all resident memory (VmRSS)."""
    gc.collect()
    rolled, status = (Path("/proc/self", name).read_text() for name in ("smaps_rollup", "status"))
    return parse_bytes(rolled, "Pss"), parse_bytes(status, "VmRSS")


def held(job: Job, model: str, report: Report) -> dict[str, int]:
    """This rank's memory after backward, before the update; Pss and peak in excess of a process with the bare model."""
    prepare(job)
    (variant,) = job.variants
    module, batch = make_model(model, job.seed), make_batch(model, job.seed, dist.get_rank(), 0)
    loss = find_model(model, job.seed).loss
    pay_fixed_costs()
    loss(run_forward(module, batch)).backward()
    module.zero_grad(set_to_none=True)
    dist.barrier()
    bare_pss, bare_rss = resident()
    trainer = lineup_of(job.case).builders[variant.name](module)
    trainer.loss = loss
    for done in range(WARMUP_STEPS):
        trainer.step(batch)
        report(done, WARMUP_STEPS)
    trainer.backward(batch)
    dist.barrier()  # Pss depends on what the others have mapped
    found = {
        "parameter_bytes": storage_bytes(trainer.parameter_tensors()),
        "gradient_bytes": storage_bytes(trainer.gradient_tensors()),
        "state_bytes": storage_bytes(trainer.state_tensors()),
        "pss_bytes": resident()[0] - bare_pss,
    }
    dist.barrier()
    trainer.update()
    if not reset_peak():
        raise OSError("/proc/self/clear_refs can't be written, so a step's peak can't be measured")
    for _ in range(MEASURED_STEPS):
        trainer.step(batch)
    return {**found, "peak_bytes": parse_bytes(Path("/proc/self/status").read_text(), "VmHWM") - bare_rss}


def measure_memory(job: Job, model: str, report: Report) -> dict[str, Any]:
    """The job's variant on one model: the largest rank's memory, or why the variant was left out."""
    (variant,) = job.variants
    found: list[dict[str, int]] = []
    reason = first_problem(lambda: found.append(held(job, model, report)))
    if reason and variant.role is Role.OURS:
        raise RuntimeError(f"'{variant.name}' on model '{model}': {reason}")
    by_rank: list[Any] = [None] * job.world_size
    dist.all_gather_object(by_rank, found)
    raw = describe_model(model, make_model(model, job.seed), job.seed)
    return {**raw, "left_out": reason, "ranks": [] if reason else [rank[0] for rank in by_rank]}


# --- results, tables and plots ---------------------------------------------------------------------------------------


def run_time(case: BenchCase, settings: Settings, display: Display) -> list[Result]:
    """All variants take turns, with all models in one launch."""
    job = settings.job_of(case)
    job = replace(job, variants=lineup_of(case.name).chosen(job))
    display.start(case.name)
    return [time_result(case.name, raw, job.world_size) for raw in case.launch(job, display)]


def time_result(case: str, raw: dict[str, Any], world_size: int) -> Result:
    step_ms, update_ms = raw["step_ms"], raw["update_ms"]
    variants = lineup_of(case).variants
    best, rows = compared_rows([variants[name] for name in step_ms], np.stack(list(step_ms.values())))
    for row in rows:
        mine, whole = update_ms[row["name"]], update_ms[REFERENCE]
        row |= {"update_ms": summarize(mine), "update_ratio": paired_ratio(mine, whole).to_dict()}
    rounds = len(step_ms[REFERENCE])
    about = {"unit": "ms", "rounds": rounds, "best_torch": best, "left_out": raw["left_out"]}
    return model_result(case, raw, world_size, rows, **about)


def run_memory(case: BenchCase, settings: Settings, display: Display) -> list[Result]:
    """Each variant has its own processes, so that leftovers of one do not count for the next."""
    job, results = settings.job_of(case), []
    for world_size in job.options["ranks"]:
        for model in job.models:
            raws, variants = {}, lineup_of(case.name).chosen(job)
            for index, variant in enumerate(variants):
                display.start(case.name)
                display.update(f"{model}, {variant.name}, {world_size} ranks", index, len(variants))
                alone = replace(job, models=(model,), variants=(variant,), world_size=world_size)
                (raws[variant.name],) = case.launch(alone, display, Place(ALLOCATOR_ENVIRONMENT))
            results.append(memory_result(case.name, raws, world_size))
    return results


def memory_result(case: str, raws: dict[str, dict[str, Any]], world_size: int) -> Result:
    """One model: the largest rank's memory by variant."""
    rows = [
        {
            "name": name,
            "role": role_of(name).value,
            **{key: max(rank[key] for rank in raw["ranks"]) for key in MEMORY_KEYS},
        }
        for name, raw in raws.items()
        if raw["ranks"]
    ]
    left_out = {name: raw["left_out"] for name, raw in raws.items() if raw["left_out"]}
    return model_result(case, raws[REFERENCE], world_size, rows, unit="MB", left_out=left_out)


def with_left_out(table: Table, result: Result) -> Table:
    lines = [f"{name} is left out: {reason}" for name, reason in result["left_out"].items()]
    table.caption = Text("\n".join(lines), style="yellow") if lines else None
    return table


def time_table(result: Result) -> Table:
    def cells(row: dict[str, Any]) -> list[str | Text]:
        times = (number(row[key]["median"]) for key in ("step_ms", "update_ms"))
        ratios = (ratio_text(row[key]) for key in ("ratio_to_best_torch", "update_ratio"))
        return [text for pair in zip(times, ratios, strict=True) for text in pair]

    ratio = "p50 [95% CI]"
    columns = ("step p50\nms", f"to torch's best\n{ratio}", "update p50\nms", f"to {REFERENCE}'s\n{ratio}")
    return with_left_out(variants_table(result, columns, cells), result)


def memory_table(result: Result) -> Table:
    columns = [f"{key.removesuffix('_bytes')}\nMB" for key in MEMORY_KEYS]
    table = variants_table(result, columns, lambda row: [f"{row[key] / MB:.1f}" for key in MEMORY_KEYS])
    return with_left_out(table, result)


def time_case(
    name: str, what: str, models: tuple[str, ...], quick_models: tuple[str, ...], **more: Option
) -> BenchCase:
    return BenchCase(
        name=name,
        title=f"a training step with {what}, by package",
        models=models,
        quick_models=quick_models,
        caps_mb=(),
        takes_caps=False,
        options=lineup_of(name).options | more,
        measure=time_training,
        run=run_time,
        table=time_table,
        draw=partial(draw_bars, key="step_ms", label="step, ms (p25..p75)"),
        note=(
            f"{name}: zero_grad, forward, backward and update, of the slowest rank in ms, and the update alone. Before "
            "and after, all parameters must equal those of torch-ddp; a package that differs or fails is left out."
        ),
    )


def memory_case(name: str, what: str, quick_models: tuple[str, ...], **more: Option) -> BenchCase:
    ranks = Option((2, 4), several(whole_number(2, MAX_WORLD_SIZE)), "Numbers of ranks. [default: 2,4]", (2,))
    return BenchCase(
        name=name,
        title=f"a rank's memory with {what}, by package",
        models=("gpt",),
        quick_models=quick_models,
        caps_mb=(),
        takes_caps=False,
        options=lineup_of(name).options | {"ranks": ranks} | more,
        measure=measure_memory,
        run=run_memory,
        table=memory_table,
        draw=partial(draw_bars, key="peak_bytes", label="peak of a rank, MB"),
        note=(
            f"{name}: of the rank with most, between backward and update. pss (private memory and a share of shared "
            "memory) and the peak of a step are in excess of a process with the bare model. The peak counts shared "
            "memory fully on each rank."
        ),
    )


DTYPE = Option(
    "float32", one_of(("float32", "bfloat16")), "Of Newton-Schulz; torch's own is bfloat16, slow on old CPUs."
)
CASES = (
    time_case("sharded", "a sharded optimizer", ("mlp", "gpt"), ("mlp",)),
    memory_case("sharded_memory", "a sharded optimizer", ("mlp",)),
    time_case("muon", "Muon and AdamW", ("gpt",), ("gpt",), newton_schulz=DTYPE),
    memory_case("muon_memory", "Muon and AdamW", ("gpt",), newton_schulz=DTYPE),
)
