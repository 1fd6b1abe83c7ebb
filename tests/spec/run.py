"""Runs programs on ranks, several in a row on the same processes, and compares every gradient with the reference."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness import run_outcomes
from tests.spec import program as programs
from tests.spec.covering import Row
from tests.spec.program import Program, standalone
from tests.spec.reference import World
from tests.spec.table import DEFAULTS, Exclusion

GROUP_TIMEOUT_S = 40.0  # a rank whose peer has failed waits for it this long
OURS = "torchddp.DistributedDataParallel"
# Sums in another order than the reference's, and weighted means: this many roundings, of the largest element.
ROUNDINGS = 6


@dataclass(frozen=True)
class Failure:
    """Where a rank's program first differs from the reference, or from the error to expect."""

    rank: int
    lines: tuple[str, ...]  # the program's, up to this call
    what: str
    check: str = ""  # a line that fails where the gradient differs
    ends: bool = False  # the ranks can't go on together

    def text(self, row: Row) -> str:
        """What differs, the row, and a program that repeats it."""
        values = {name: value for name, value in row.items() if value != DEFAULTS[name]}
        repeats = f"\n\n{standalone(row, self.lines, self.check)}" if self.lines else ""
        return f"rank {self.rank}: {self.what}\n{values}{repeats}"


def run_rows(
    rows: Sequence[Row], ddp: str = OURS, refusal: Exclusion | None = None, mutate: Any = None
) -> dict[int, list[Failure]]:
    """By index of the row, what differs. All rows have the same number of ranks."""
    failures: dict[int, list[Failure]] = {}
    first = 0
    while first < len(rows):
        world_size = int(rows[0]["ranks"])
        limits = {"group_timeout_s": GROUP_TIMEOUT_S, "straggler_s": 2 * GROUP_TIMEOUT_S}
        with tempfile.TemporaryDirectory(prefix="torchddp_spec_") as folder:
            work = (rows[first:], ddp, refusal, mutate, folder)
            outcomes = run_outcomes(_run_on_rank, world_size, *work, **limits)
            by_rank = [_load(Path(folder) / str(rank)) for rank in range(world_size)]
        for outcome, results in zip(outcomes, by_rank, strict=True):
            if len(results) < len(rows) - first and not (results and results[-1] is not None and results[-1].ends):
                results.append(Failure(outcome.rank, (), f"exit code {outcome.exit_code}: {outcome.error}", ends=True))
        done = min(map(len, by_rank))
        for i in range(done):
            found = [results[i] for results in by_rank if results[i] is not None]
            if found:
                failures[first + i] = found
        first += done
    return failures


def _load(path: Path) -> list[Failure | None]:
    """What a rank has found, also if it has died."""
    results = []
    with contextlib.suppress(EOFError, FileNotFoundError), path.open("rb") as file:
        while True:
            results.append(pickle.load(file))
    return results


def _run_on_rank(rank: int, rows: Sequence[Row], ddp: str, refusal: Exclusion | None, mutate: Any, folder: str) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("torchddp").setLevel(logging.ERROR)
    with (Path(folder) / str(rank)).open("wb") as file:
        for row in rows:
            result = _run(Program(row, rank), ddp, refusal, mutate)
            gc.collect()
            pickle.dump(result, file)
            file.flush()
            if result is not None and result.ends:
                return
            try:
                dist.barrier()
            except RuntimeError:  # a peer has ended
                return


def _run(program: Program, ddp: str, refusal: Exclusion | None, mutate: Any) -> Failure | None:
    os.environ.pop("TORCHDDP_HOST_ID", None)
    names: dict[str, Any] = {}
    exec(programs.PRELUDE, names)
    names |= {"rank": program.rank, "world_size": program.size, "os": os}
    lines: list[str] = []
    failure: Failure | None = None

    def error_of(line: str) -> Exception | None:
        lines.append(line)
        try:
            exec(line, names)
        except Exception as error:
            names["trace"] = traceback.format_exc()
            error.__traceback__ = None
            return error
        return None

    def at(what: str, **more: Any) -> Failure:
        return Failure(program.rank, tuple(lines), what, **more)

    if refusal is not None:
        for line in (*program.setup(ddp), *(op.line for op in program.ops())):
            if (error := error_of(line)) is not None:
                is_right = _matches(error, refusal.error, refusal.words)
                return None if is_right else at(f"{error!r}, instead of {refusal.words!r}", ends=True)
        return at(f"nothing raised, instead of {refusal.words!r}")
    for line in program.setup(ddp):
        if (error := error_of(line)) is not None:
            return at(f"{error!r}\n{names['trace']}", ends=True)
    world = program.world()
    largest: dict[str, float] = {}
    if mutate is not None:
        mutate(world)
    for op in program.ops():
        error = error_of(op.line)
        if program.row["wrapper"] == "sharded":
            owner_of = names["optimizer"].param_to_rank
            all_parameters = {name: _parameter(names["module"], name) for name in program.names}
            world.settings.owners = {n: owner_of[p] for n, p in all_parameters.items() if p in owner_of}
        world.errors = [None] * world.size
        op.do(world)
        expected = world.errors[program.index]
        if not _matches(error, type(expected) if expected else None, str(expected)):
            trace = names.get("trace", "") if error else ""
            check = "" if error else f"raise AssertionError({f'it should raise {expected!r}'!r})"
            return at(f"raised {error!r}, the reference {expected!r}\n{trace}", check=check, ends=True)
        if any(isinstance(error, RuntimeError) for error in world.errors):
            return failure
        if failure is None:
            found = _difference(names["module"], program, world, largest)
            found = found or _other_squares(names.get("engine", names["model"]), program, world)
            failure = None if found is None else at(**found)
        world.squares = []
    return failure


def _matches(error: Exception | None, kind: type[Exception] | None, words: str) -> bool:
    if error is None or kind is None:
        return error is None and kind is None
    return type(error) is kind and words in str(error)


def _parameter(module: torch.nn.Module, name: str) -> Any:
    return module.table.weight if name == "s" else getattr(module, name)


def narrows(program: Program) -> bool:
    """Whether gradients travel in 16 bits."""
    row = program.row
    return "compress" in row["comm_hook"] or row["wire"] != "None" or row["reduce_fp16"] == "True"


def tolerance(program: Program, world: World, dtype: torch.dtype) -> float:
    """Relative to the largest element; 0 where ranks are summed in the reference's order, or order doesn't matter."""
    in_order = len(world.ranks) <= 2 or (program.row["transport"] == "'shm'" and program.row["comm_hook"] == "None")
    if not world.is_rounded and (in_order or not world.order_matters):
        return 0.0
    dtypes = [dtype]
    if program.row["edit"] == "clip":  # the norm is computed in each gradient's dtype
        dtypes += [p.dtype for p in program.parameters.values()]
    if narrows(program):
        dtypes.append(torch.bfloat16)
    return ROUNDINGS * max(torch.finfo(d).eps for d in dtypes)


def _difference(
    module: torch.nn.Module, program: Program, world: World, largest: dict[str, float]
) -> dict[str, Any] | None:
    """The first difference. `largest`: each one's largest element so far, whose rounding may have been kept."""
    for name, want in world.seen(program.index).items():
        parameter, _, where = name.partition(".")
        text = f"module.{'table.weight' if parameter == 's' else parameter}.{where or 'grad'}"
        got = getattr(_parameter(module, parameter), where or "grad")
        if want is None or got is None or want.dtype != got.dtype:
            if want is not got:
                right = "None" if want is None else str(want.dtype)
                check = f"assert rank != {program.rank} or str(getattr({text}, 'dtype', None)) == {right!r}, {text}"
                return {"what": f"{name} is {_brief(got)}, the reference says {_brief(want)}", "check": check}
            continue
        mine, expected = _flat(got), _flat(want)
        # In 16 bits, what is left of large gradients that cancel each other has their rounding.
        added = world.largest[parameter] if narrows(program) else 0.0
        largest[name] = max(largest.get(name, 1.0), expected.abs().max().item(), added)
        limit = tolerance(program, world, want.dtype) * largest[name]
        wrong = ~((mine.double() - expected.double()).abs() <= limit)
        if wrong.any():
            at = int(wrong.nonzero()[0].item())
            flat = f"torch.view_as_real({text})" if want.is_complex() else f"{text}.to_dense()"
            value = f"{flat}.flatten()[{at}].item()"
            check = f"assert rank != {program.rank} or abs({value} - {expected[at].item()!r}) <= {limit!r}, {value}"
            said = f"element {at} of {name} is {mine[at].item()!r}, the reference says {expected[at].item()!r}"
            return {"what": said, "check": check}
    return None


def _other_squares(model: Any, program: Program, world: World) -> dict[str, Any] | None:
    """gradient_stats() after a reduction, except under join(), where ranks have taken part in different ones."""
    row = program.row
    is_one = row["wrapper"] in ("one", "replicate")
    if row["gradient_stats"] == "False" or not is_one or row["join"] != "never" or not world.squares:
        return None
    want, got = world.squares[program.index], model.gradient_stats()[:, 0].sum().item()
    dtypes = [torch.float32, *(p.dtype for p in program.parameters.values())]
    limit = (
        4
        * ROUNDINGS
        * max(torch.finfo(torch.bfloat16).eps if narrows(program) else torch.finfo(d).eps for d in dtypes)
        * max(1.0, want)
    )
    if abs(got - want) <= limit:
        return None
    value = f"{'engine' if row['wrapper'] == 'replicate' else 'model'}.gradient_stats()[:, 0].sum().item()"
    check = f"assert rank != {program.rank} or abs({value} - {want!r}) <= {limit!r}, {value}"
    return {"what": f"the squares of gradient_stats() are {got}, the reference says {want}", "check": check}


def _flat(grad: Tensor) -> Tensor:
    """All numbers; of a complex gradient the real and the imaginary parts."""
    grad = grad.detach().to_dense() if grad.is_sparse else grad.detach()
    return (torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad).flatten()


def _brief(grad: Tensor | None) -> str:
    return "None" if grad is None else f"{grad.dtype} {_flat(grad)[:4].tolist()}..."
