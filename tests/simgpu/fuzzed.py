"""The random programs of tests/fuzz on the simulated GPU: after each line, what ours shows on the CPU, bit for bit."""

import contextlib
import gc
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import torchddp
from tests.fuzz.draw import draw
from tests.fuzz.model import hash_of
from tests.fuzz.program import Program
from tests.fuzz.run import agree, attempt, numbered
from tests.fuzz.side import Side
from tests.fuzz.wanted import strictness_for
from tests.harness import keep_alive
from tests.shm_backend import shm_group
from tests.simgpu.group import Group
from tests.whole_buckets import large_from, packed_whole

# Lines that the simulated GPU can't run, or whose tensors torch handles or sums in other ways on an unknown device.
# torch's built-in hooks need a process group in C++, too.
LINES = ("autocast", "numpy", "deepcopy", "conj", "_neg_view", "halves", "0.1 * sum", "join()")
SEED = 2026
GROUP_TIMEOUT_S = 60.0
Shown = list[dict[str, torch.Tensor | None]]


def programs(world_size: int) -> Iterator[tuple[int, Program]]:
    """Those that can run there, with their trials."""
    for trial in itertools.count():
        program = draw(SEED, trial, world_size=world_size)
        # A copy has no gaps: torch's loops over 16 bits round contiguous memory in other places, as do its RNNs, and
        # gradients that swap_grads() exchanges have equal strides.
        swaps = "swap_grads" in repr(program.steps)
        fits = not any(
            part.sparse or part.kind == "recurrent" or (part.layout == "gaps" and ("16" in part.dtype or swaps))
            for part in program.parts
        )
        fits = fits and not program.comm_hook.startswith("builtin") and strictness_for(program).values
        if fits and not any(word in repr(program.steps) for word in LINES):
            # torch's loops over foreach's tensors round factors to 16 bits on one device and not on the other.
            optimizer = re.sub(r"(, foreach=\w+)?\)$", ", foreach=False)", program.optimizer)
            optimizer = optimizer.replace("zero(torch.optim.SGD, ", "torch.optim.SGD(trained(), ")
            yield trial, replace(program, transport="auto", optimizer=optimizer)


def run_lines(program: Program, rank: int, device: str, transport: str, count: int | None) -> tuple[Shown, int]:
    """What is visible after each line, on the CPU, and how many lines no rank raised in (collective on the CPU).

    `count`: run only this many.
    """
    group = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    hook_group: Any = None  # both add in the order of the ranks
    if transport == "simulated":
        hook_group = Group()
    elif transport == "shm":
        hook_group = shm_group()
    changed = replace(program, transport=transport)
    side = Side(changed, torchddp.DistributedDataParallel, rank, group, device, hook_group)
    shown: Shown = []
    for number, (step, line) in enumerate(list(numbered(program))[:count]):
        torch.manual_seed(hash_of(program.key, rank, number))
        raised = attempt(side, line, step)
        if count is not None and raised is not None:
            raise AssertionError(f"{line!r} raised {raised}\n{raised.traceback}")
        if count is None and agree(raised is not None):
            break
        visible = {f"{kind} {name}": v for kind, values in side.visible().items() for name, v in values.items()}
        shown.append({name: None if v is None else v.detach().clone() for name, v in visible.items()})
        side.seen.clear()
    shown = [{name: None if v is None else v.cpu() for name, v in values.items()} for values in shown]
    del side
    gc.collect()
    if isinstance(hook_group, Group):
        hook_group.close()
    elif hook_group is not None:
        dist.destroy_process_group(hook_group)
    keep_alive(group)
    dist.destroy_process_group(group)
    return shown, len(shown)


def compare(program: Program, rank: int, device: str, limit: int) -> list[str]:
    """How they differ; `limit`: gradients from this size on are reduced in place."""
    with packed_whole():
        expected, count = run_lines(program, rank, "cpu", "c10d" if program.world_size == 1 else "shm", None)
    with large_from(limit) if limit else contextlib.nullcontext():
        seen, _ = run_lines(program, rank, device, "simulated", count)
    lines = list(numbered(program))
    for (step, line), wanted, got in zip(lines, expected, seen, strict=False):
        if wanted.keys() != got.keys():
            return [f"step {step}, {line!r}: other names: {sorted(wanted.keys() ^ got.keys())}"]
        for name, value in wanted.items():
            other = got[name]
            if (value is None) != (other is None) or (value is not None and not same(value, other)):
                return [f"step {step}, {line!r}: {name} is {brief(other)} instead of {brief(value)}"]
    return []


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def brief(value: torch.Tensor | None) -> str:
    return "None" if value is None else f"{value.dtype} {value.flatten()[:4].tolist()}..."
