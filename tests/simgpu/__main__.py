"""Runs programs on the simulated GPU and compares them with the CPU. Prints one JSON object.

    python -m tests.simgpu --world-size 2 --seeds 0 100

With --leave-out PLACE, one record or wait of the product does nothing, and something should be found.
"""

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.simgpu.device import NAME, simulated  # first: it takes the place of torchddp._C

# isort: split
import torch

from tests.fuzz.program import Program
from tests.harness import run_ranks
from tests.simgpu import captured as captured_programs
from tests.simgpu import diloco as diloco_programs
from tests.simgpu import program as plain_programs
from tests.simgpu import stopping
from tests.simgpu.fuzzed import compare, programs
from torchddp import DDP
from torchddp.transport import nccl
from torchddp.transport.select import TransportKind, register

register(TransportKind("simulated", NAME, "moves tensors of the simulated GPU", lambda _devices: "", nccl.connect))


def plain(seed: int, rank: int) -> list[str]:
    """How a program of tests/simgpu/program.py differs from the CPU (collective)."""
    return compare_with_cpu(plain_programs, seed, rank)


def captured(seed: int, rank: int) -> list[str]:
    """The same for tests/simgpu/captured.py."""
    return compare_with_cpu(captured_programs, seed, rank)


def diloco(seed: int, rank: int) -> list[str]:
    """The same for tests/simgpu/diloco.py."""
    return compare_with_cpu(diloco_programs, seed, rank)


def compare_with_cpu(kind: Any, seed: int, rank: int) -> list[str]:
    program = kind.draw(seed)
    # Shared memory also sums in the order of the ranks.
    alone = torch.distributed.get_world_size() == 1
    expected = kind.run(program, rank, torch.device("cpu"), "c10d" if alone else "shm")
    simulated.start_over(seed, program.late)
    seen = kind.run(program, rank, torch.device(NAME, 0), "simulated")
    if len(seen) != len(expected):
        return [f"{len(seen)} values instead of {len(expected)}"]
    wrong = sum(not torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
    return [f"{wrong} of {len(seen)} values differ from the CPU's"] if wrong else []


_programs: dict[int, tuple[list[tuple[int, Program]], Iterator[tuple[int, Program]]]] = {}  # by world size


def fuzzed(seed: int, rank: int) -> list[str]:
    """How a program of tests/fuzz differs from the CPU (collective)."""
    world_size = torch.distributed.get_world_size()
    known, source = _programs.setdefault(world_size, ([], programs(world_size)))
    known.extend(itertools.islice(source, max(0, seed + 1 - len(known))))
    trial, program = known[seed]
    simulated.start_over(seed, (0, 50, 100)[seed % 3])
    return [f"trial {trial}: {text}" for text in compare(program, rank, f"{NAME}:0", (0, 1, 1000)[seed // 3 % 3])]


def swapped(seed: int, rank: int) -> list[str]:
    """Two models with a communicator each, whose backwards rank 1 runs in the other order in the second step."""
    device = torch.device(NAME, 0)
    simulated.start_over(seed, 0)
    groups = (None, plain_programs.second_group())
    models = [DDP(torch.nn.Linear(3, 3).to(device), transport="simulated", process_group=group) for group in groups]
    for orders in ((1, 1), (1, -1)):  # the first step's backwards compare the models
        losses = [model(torch.ones(1, 3).to(device)).sum() for model in models]
        for loss in losses[:: orders[rank]]:
            loss.backward()
    return []


LIMIT_S = 3000.0
KINDS = {
    **{"plain": plain, "fuzzed": fuzzed, "captured": captured},
    **{"diloco": diloco, "swapped": swapped, "stopping": stopping.run},
}


def body(rank: int, kind: str, seeds: range, place: str, defect: str, until_found: bool) -> dict[str, Any]:
    simulated.leave_out(place)
    simulated.set_defect(defect)
    found: dict[int, list[str]] = {}
    places: Counter[str] = Counter()
    operations, orders = 0, []
    for seed in seeds:
        try:
            problems = KINDS[kind](seed, rank)
            simulated.synchronize()
        except Exception as error:  # of garbage that a race or a broken rule has let through
            raise RuntimeError(f"found: {[*simulated.races(), *simulated.broken_rules()]}") from error
        problems += [*simulated.races(), *simulated.broken_rules()]
        places.update(simulated.places())
        operations += simulated.operations()
        orders.append(simulated.order())
        if problems:
            found[seed] = problems
        done = torch.tensor(float(bool(problems)))
        torch.distributed.all_reduce(done)
        if until_found and done:
            break
    return {"found": found, "places": places, "operations": operations, "order": orders}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simgpu")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--kind", choices=KINDS, default="plain")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 100), metavar=("FIRST", "END"))
    parser.add_argument("--leave-out", default="", metavar="PLACE")
    parser.add_argument("--defect", default="", help="see set_defect's uses in csrc/")
    parser.add_argument("--until-found", action="store_true", help="stop at the first program with a problem")
    args = parser.parse_args()
    ranks = run_ranks(
        body,
        args.world_size,
        args.kind,
        range(*args.seeds),
        args.leave_out,
        args.defect,
        args.until_found,
        timeout=LIMIT_S,
    )
    print(json.dumps(ranks))


if __name__ == "__main__":
    main()
