"""The reducer on a simulated GPU: the CPU's values in whatever order the device works, no race, and no rule of NCCL
broken. And what is noticed if one of the reducer's records or waits is left out."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not list((ROOT / "build" / "cpu").glob("simulated_gpu.*.so")), reason="not built: make simulated-gpu"
)
# By kind and world size: how many programs `make test` and `make test-slow` run, and how many `make test-thorough`.
PROGRAMS = {
    ("plain", 1): (100, 4000),
    ("plain", 2): (60, 3000),
    ("plain", 3): (10, 1000),
    ("plain", 4): (4, 500),
    ("fuzzed", 1): (25, 1000),
    ("fuzzed", 2): (6, 500),
    ("fuzzed", 3): (4, 250),
    ("fuzzed", 4): (2, 200),
    ("captured", 1): (50, 1500),
    ("captured", 2): (8, 500),
    ("diloco", 2): (8, 500),
    ("diloco", 3): (5, 250),
}
# What CUDA refuses in a capture, by the case of refusals.py.
REFUSED = {
    "other_work": "a wait for work outside of the graph",
    "no_join": "a fork that does not join",
    "default_stream": "the default stream",
    "query": "a query of an event of the graph",
    "event_wait": "waiting for an event of the graph",
    "item": "waiting for a stream of the graph",
    "to_host": "a copy that waits for the device",
    "stream_wait": "waiting for a stream of the graph",
    "device_wait": "waiting for the device",
}
# Faults of the reducer, for which the simulated device stands in, and part of what is said about each.
DEFECTS = {
    "packs one less": "differ from the CPU's",
    "packs elsewhere": "nothing orders",
    "packs without the factor": "differ from the CPU's",
    "reduces elsewhere": "nothing orders",
    "reduces one less": "differ from the CPU's",
    "NCCL's factor is lost": "differ from the CPU's",
    "memory given back in flight": "the release of its memory",
    "rank 1 has another order": "calls all_reduce",
    "operator never destroyed": "never destroyed",
    "records elsewhere": "nothing orders",
}


def run(kind: str, world_size: int, seeds: range, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """What each rank reports, and the output; no reports if the ranks ended with an error."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.simgpu", "--kind", kind, "--world-size", str(world_size)]
    command += ["--seeds", str(seeds.start), str(seeds.stop), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else [], done.stdout + done.stderr


def found_by(*case: Any) -> str:
    """All that was found, as text."""
    reports, output = run(*case)
    return output if not reports else json.dumps([report["found"] for report in reports if report["found"]] or "")


def check(kind: str, world_size: int, seeds: range) -> None:
    reports, output = run(kind, world_size, seeds)
    assert reports, output
    assert [report["found"] for report in reports] == [{}] * world_size
    assert all(len(report["order"]) == len(seeds) for report in reports)


QUICK = (("plain", 1), ("plain", 2), ("fuzzed", 1), ("captured", 1))


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in PROGRAMS],
)
def test_programs_see_the_values_of_the_cpu(kind, world_size):
    check(kind, world_size, range(PROGRAMS[kind, world_size][0]))


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "world_size"), PROGRAMS)
def test_thousands_of_programs_see_the_values_of_the_cpu(kind, world_size):
    check(kind, world_size, range(PROGRAMS[kind, world_size][1]))


def test_a_capture_refuses_what_cuda_refuses():
    command = [sys.executable, "-W", "ignore", "-m", "tests.simgpu.refusals"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert said.pop("allowed") == []
    assert said.keys() == REFUSED.keys()
    for case, what in REFUSED.items():
        assert f"a capture does not allow {what}" in said[case], said


@pytest.mark.slow
def test_a_seed_repeats_exactly():
    once, again = (run("plain", 1, range(20, 24))[0][0] for _ in range(2))
    assert once["order"] == again["order"] and once["places"] == again["places"]
    assert len(set(once["order"])) == 4


@pytest.mark.slow
def test_a_wait_that_is_left_out_is_noticed():
    """One of each end of the communication stream."""
    places = run("plain", 1, range(1))[0][0]["places"]
    waits = [place for place in places if place.startswith("wait at communicator.cpp")]
    assert len(waits) == 2
    for place in waits:
        assert "nothing orders" in found_by("plain", 1, range(20), "--until-found", "--leave-out", place), place


def is_noticed(place: str, kind: str) -> bool:
    found = found_by(kind, 1, range(1000), "--until-found", "--leave-out", place)
    return "nothing orders" in found or "a capture does not allow" in found


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_every_record_and_every_wait_is_needed(capsys):
    """What is redundant would be listed here, with the reason: nothing is."""
    kind_of: dict[str, str] = {}
    for kind in ("plain", "captured"):
        reports, output = run(kind, 1, range(200))
        assert reports, output
        for place in reports[0]["places"]:
            if "backend.cpp" not in place:  # those are torch's
                kind_of.setdefault(place, kind)
    missed = [place for place, kind in sorted(kind_of.items()) if not is_noticed(place, kind)]
    with capsys.disabled():
        print(f"\n{len(kind_of) - len(missed)} of {len(kind_of)} left-out records and waits were noticed")
    assert len(kind_of) >= 13 and not missed


@pytest.mark.slow
@pytest.mark.rest_is_thorough("2")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_that_are_asked_to_stop_end_after_the_same_step(world_size):
    check("stopping", world_size, range(2))  # the second one replays


def test_another_order_of_two_communicators_is_noticed():
    assert "launch calls of several communicators in different orders" in found_by("swapped", 2, range(1))


@pytest.mark.rest_is_thorough("packs elsewhere", "reduces elsewhere")
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_noticed(defect):
    assert DEFECTS[defect] in found_by("plain", 2, range(40), "--until-found", "--defect", defect)
