"""Ranks that hang in collectives of the program: one report names each of them with its function and its line."""

import pytest

from tests.fault import hanging_programs
from tests.fault.hanging_programs import KINDS, draw, named_in

pytestmark = pytest.mark.beyond_torch("torch waits in silence")

FAST = (3, 8, 12, 14, 37)
SLOW = [seed for seed in range(50) if seed not in FAST]


@pytest.mark.parametrize("seed", [*FAST, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)])
def test_a_random_program_that_hangs(seed, tmp_path):
    """Each rank that is in a call, and each that is in none, is named where it is, by one report."""
    program = draw(seed)
    ended = hanging_programs.run(program, tmp_path)
    told = f"{program.source}\n{ended}"
    assert len(ended.reports) == 1, told
    headline = ended.reports[0].partition("\n")[0]
    named = named_in(headline)
    hanging = {rank: place for rank, place in enumerate(ended.places) if place.line}
    assert len(hanging) == program.world_size, told
    for rank, place in hanging.items():
        assert named.get(rank) == (place.function, f"program{seed}.py", place.line), f"rank {rank}: {told}"
    assert ("they differ from call" in headline) == (program.kind in KINDS[:4] or program.kind == "new group"), told


def test_the_programs_are_of_all_kinds():
    programs = [draw(seed) for seed in range(50)]
    assert {program.kind for program in programs} == set(KINDS)
    assert {program.world_size for program in programs} == {2, 3, 4}
    assert {program.backend for program in programs} == {"gloo", "torchddp_shm"}
    assert len({program.source for program in programs}) == 50
