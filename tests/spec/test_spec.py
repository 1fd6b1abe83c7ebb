"""The package and torch's class do what the reference says, in programs that combine every two (or three) values."""

import dataclasses
import functools
import inspect
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torchddp
from tests.programs import ROOT, clean_environment
from tests.spec import table
from tests.spec.covering import Row, combinations, complete, covering_array, within
from tests.spec.program import MAX_LINES, TORCHS, Program, standalone
from tests.spec.reference import World
from tests.spec.run import run_rows
from torchddp.ddp.module import OPTIONS, DistributedDataParallel
from torchddp.sharded.data_parallel import ShardedDataParallel

pytestmark = pytest.mark.beyond_torch("the options of torchddp")
RANKS = ("1", "2", "3", "4")
PIECES = 2  # in which the rows of a number of ranks run, so that they run concurrently
TRIPLES = 12


@functools.cache
def array(strength: int) -> list[Row]:
    return covering_array(table.COLUMNS, strength, table.FORBIDDEN)


def check(rows: Sequence[Row], **how: object) -> None:
    failures = run_rows(rows, **how)
    texts = [next((f for f in found if f.lines), found[0]).text(rows[i]) for i, found in failures.items()]
    assert not texts, f"{len(texts)} of {len(rows)} programs\n" + "\n\n".join(texts[:3])


def test_every_option_has_a_column():
    """Or a reason not to have one."""
    assert set(OPTIONS) == table.OPTIONS.keys() | table.NOT_DRAWN.keys() | table.FIELDS.keys()
    assert not table.OPTIONS.keys() & table.NOT_DRAWN.keys()
    for name, values in table.OPTIONS.items():
        default = inspect.signature(DistributedDataParallel).parameters[name].default
        assert name == "transport" or eval(values[0], {"torch": torch}) == default, name
    for kind, columns in ((torchddp.Precision, table.PRECISION), (torchddp.Checks, table.CHECKS)):
        assert {name: eval(values[0]) for name, values in columns.items()} == dataclasses.asdict(kind())


def test_every_option_of_sharded_models_has_a_column():
    parameters = inspect.signature(ShardedDataParallel.__init__).parameters
    taken = parameters.keys() - {"self", "module", "sharded_optimizer"} - table.NOT_DRAWN.keys()
    assert taken == table.SHARDED_TAKES | table.SHARDED_OPTIONS.keys() | {"checks"}
    for name, values in table.SHARDED_OPTIONS.items():
        assert eval(values[0]) == parameters[name].default, name


def test_every_option_of_replicated_modules_has_a_column():
    own = {"module", "mesh", "mp_policy", "ignored_modules", "ignored_params", "device_id"}
    taken = inspect.signature(torchddp.replicate).parameters
    drawn = table.OPTIONS.keys() - {"process_group", *table.REPLICATE_REFUSES} | table.FIELDS.keys()
    assert taken.keys() - own == drawn
    declared = inspect.signature(DistributedDataParallel).parameters
    assert all(taken[name].default == declared[name].default for name in drawn)


@pytest.mark.parametrize("strength", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_the_array_covers_every_combination_that_is_allowed(strength, capsys):
    rows = array(strength)
    assert not [row for row in rows if any(e.applies(row) for e in (*table.EXCLUSIONS, *table.FAULTS))]
    covered = {each for row in rows for each in within(row, strength)}
    every = list(combinations(table.COLUMNS, strength))
    left = [each for each in every if each not in covered]
    possible = [each for each in left if complete(dict(each), table.COLUMNS, table.FORBIDDEN) is not None]
    assert not possible, possible[:5]
    with capsys.disabled():
        print(
            f"\n{len(covered)} of {len(every)} combinations of {strength} in {len(rows)} programs, {len(left)} excluded"
        )


@pytest.mark.parametrize("piece", range(PIECES))
@pytest.mark.parametrize("ranks", RANKS)
def test_pairs(ranks, piece):
    check([row for row in array(2) if row["ranks"] == ranks][piece::PIECES])


@pytest.mark.thorough
@pytest.mark.parametrize("piece", range(TRIPLES))
@pytest.mark.parametrize("ranks", RANKS)
def test_triples(ranks, piece):
    check([row for row in array(3) if row["ranks"] == ranks][piece::TRIPLES])


def test_torchs_class_does_what_the_reference_says():
    """At three ranks with gradients whose sums have the same bits in each order."""
    forbidden = [e.values for e in (*table.EXCLUSIONS, *table.FAULTS, *table.TORCH_FAULTS)]
    rows = covering_array(table.TORCH_COLUMNS, 2, forbidden)
    for ranks in ("1", "2", "3"):
        check([row for row in rows if row["ranks"] == ranks], ddp=TORCHS)


# Classes that take the device's code paths on the CPU: buckets are packed when they are complete, large gradients stay.
ON_DEVICES = "__import__('tests.whole_buckets', fromlist=['*'])."


@pytest.mark.parametrize("kind", ["WholeBuckets", "LargeInPlace"])
@pytest.mark.parametrize("ranks", ["2", pytest.param("3", marks=pytest.mark.thorough)])
def test_code_paths_of_devices(ranks, kind):
    columns = {**table.COLUMNS, "ranks": (ranks,), "wrapper": ("one", "two at once", "two in turn")}
    columns |= {name: values[:1] for name, values in table.SHARDED_OPTIONS.items()}
    check(covering_array(columns, 2, table.FORBIDDEN), ddp=ON_DEVICES + kind)


# Whatever rows the array has: what needs more than three values together, or once was wrong.
NAMED = {
    "two wrappers in one backward": {"wrapper": "two at once", "model": "sparse"},
    "an owner sets gradients": {"wrapper": "sharded", "edit": "assign before", "zero": "keep"},
    "a refresh between microbatches": {
        "micro": "refreshed loop", "find_unused_parameters": "True", "use": "first microbatch", "weigh": "equal",
    },
}  # fmt: skip


@pytest.mark.parametrize("values", NAMED.values(), ids=NAMED)
def test_named_programs(values):
    check([{**table.DEFAULTS, "ranks": "2", **values}])


def row_of(exclusion: table.Exclusion) -> Row:
    """A program with these values, and otherwise with defaults as far as possible."""
    values = {name: min(chosen, key=table.COLUMNS[name].index) for name, chosen in exclusion.values.items()}
    start = {"ranks": "4" if "hosts" in values else "2", **values}
    others = [e.values for e in (*table.EXCLUSIONS, *table.FAULTS) if e is not exclusion and not e.applies(start)]
    return complete(start, table.COLUMNS, others) or {**table.DEFAULTS, **start}


REFUSED = [exclusion for exclusion in table.EXCLUSIONS if exclusion.error is not None]


@pytest.mark.parametrize("exclusion", REFUSED, ids=lambda exclusion: "-".join(exclusion.values))
def test_values_that_are_refused(exclusion):
    """With an error on every rank."""
    check([row_of(exclusion)], refusal=exclusion)


@pytest.mark.thorough
@pytest.mark.parametrize("fault", table.FAULTS, ids=lambda fault: fault.words)
def test_known_faults(fault):
    """Remove the fault from the table if this fails."""
    assert run_rows([row_of(fault)]) or "sometimes" in fault.words, "mended"


def doubles(world: World) -> None:
    """A reference that forgets to divide."""
    averages = world._averages
    world._averages = lambda name, grads, count: averages(name, grads, 1)  # type: ignore[method-assign]


def run_program(text: str, path: Path) -> subprocess.CompletedProcess[str]:
    path.write_text(text)
    return subprocess.run(
        [sys.executable, path], cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=200
    )


def test_a_failure_prints_a_program_that_repeats_it(tmp_path):
    row = {**table.DEFAULTS, "ranks": "2", "micro": "no_sync", "edit": "scale", "transport": "'c10d'"}
    assert not run_rows([row])
    failure = run_rows([row], mutate=doubles)[0][0]
    assert "the reference says" in failure.what
    text = failure.text(row).partition("\n\n")[2]
    assert len(text.splitlines()) <= MAX_LINES
    failed = run_program(text, tmp_path / "wrong.py")
    assert failed.returncode != 0 and "AssertionError" in failed.stderr, failed.stderr
    right = replace(failure, check="")
    passed = run_program(right.text(row).partition("\n\n")[2], tmp_path / "right.py")
    assert passed.returncode == 0, passed.stderr


def test_programs_are_short():
    for row in array(2):
        program = Program(row, 0)
        lines = [*program.setup(), *(op.line for op in program.ops())]
        assert len(standalone(row, lines, "assert True").splitlines()) <= MAX_LINES, (row, lines)
