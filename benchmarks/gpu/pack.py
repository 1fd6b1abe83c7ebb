"""How fast a bucket is packed and unpacked, against a plain copy of as many bytes on the same device."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.cases import GpuJob
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.machine import l2_bytes
from torchddp import _C
from torchddp.bench.timing import Report, enough

# Gradients as a net has them: a few large ones, many small ones, and one whose size divides by nothing.
NUMELS = (768, 768, 147456, 384, 64, 36864, 192, 7, 589824)
# Slots of a bucket begin at multiples of this.
ALIGNMENT_BYTES = 64
# One timing moves at least this much, so that a launch's own cost and the clock's resolution do not show.
TIMED_BYTES = 2 * 1024**3
# Buffers taken in turn hold this many times the last cache.
CACHES = 4

COPY = "copy"
PACK, PACK_CAST, UNPACK = "torchddp pack", "torchddp pack to bf16", "torchddp unpack"
FOREACH = "torch._foreach_copy_"


def mixed_numels(total: int) -> list[int]:
    """Sizes of gradients that make up `total` elements."""
    sizes: list[int] = []
    left = total
    while left > 0:
        sizes.append(min(NUMELS[len(sizes) % len(NUMELS)], left))
        left -= sizes[-1]
    return sizes


def slot_offsets(numels: Sequence[int], itemsize: int) -> tuple[list[int], int]:
    """Where each gradient begins in the bucket, in elements, and how long the bucket is."""
    step = ALIGNMENT_BYTES // itemsize
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += -(-numel // step) * step
    return offsets, end


def repeats(set_bytes: int, sets: int, timed_bytes: int) -> int:
    """How often to run in one timing: every set equally often."""
    rounds = -(-timed_bytes // (set_bytes * sets))
    return sets * max(1, rounds)


def set_count(set_bytes: int, cache_bytes: int) -> int:
    """How many sets of buffers push each other out of the cache; at least two."""
    return max(2, -(-CACHES * cache_bytes // set_bytes))


@dataclass
class Bucket:
    """Gradients and the flat memory they are packed into, and a flat source for the plain copy."""

    gradients: list[Tensor]
    offsets: list[int]
    flat: Tensor
    flat_cast: Tensor
    source: Tensor

    @classmethod
    def make(cls, numels: Sequence[int], device: torch.device, generator: torch.Generator) -> Bucket:
        """Random values: equal ones would hide what is written to the wrong place."""
        offsets, length = slot_offsets(numels, 4)
        return cls(
            gradients=[torch.randn(n, generator=generator, device=device) for n in numels],
            offsets=offsets,
            flat=torch.zeros(length, device=device),
            flat_cast=torch.zeros(length, device=device, dtype=torch.bfloat16),
            source=torch.randn(sum(numels), generator=generator, device=device),
        )

    @property
    def views(self) -> list[Tensor]:
        """The slots of the flat memory."""
        return [self.flat[o : o + g.numel()] for o, g in zip(self.offsets, self.gradients, strict=True)]


@dataclass(frozen=True)
class Implementation:
    """A way of moving a bucket's bytes."""

    name: str
    # Read and written for one element.
    bytes_per_element: int
    prepare: Callable[[Bucket], Callable[[], object]]


def _copy(bucket: Bucket) -> Callable[[], object]:
    target = torch.empty_like(bucket.source)
    return lambda: target.copy_(bucket.source)


def _foreach(bucket: Bucket) -> Callable[[], object]:
    views = bucket.views
    return lambda: torch._foreach_copy_(views, bucket.gradients)


def implementations(device: torch.device) -> list[Implementation]:
    """The plain copy first. Ours need a GPU."""
    found = [Implementation(COPY, 8, _copy), Implementation(FOREACH, 8, _foreach)]
    if device.type == "cuda":
        pack, unpack = _C.pack_on_device, _C.unpack_on_device
        found += [
            Implementation(PACK, 8, lambda b: lambda: pack(b.flat, b.gradients, b.offsets)),
            Implementation(PACK_CAST, 6, lambda b: lambda: pack(b.flat_cast, b.gradients, b.offsets)),
            Implementation(UNPACK, 8, lambda b: lambda: unpack(b.flat, b.gradients, b.offsets)),
        ]
    return found


def check(implementation: Implementation, bucket: Bucket) -> None:
    """Every element of every gradient arrives, in a bucket that held nan before; and the way back brings it home."""
    if implementation.name == COPY:
        return
    wanted = [gradient.clone() for gradient in bucket.gradients]
    if implementation.name == UNPACK:
        for view, value in zip(bucket.views, wanted, strict=True):
            view.copy_(value)
        for gradient in bucket.gradients:
            gradient.fill_(float("nan"))
    bucket.flat_cast.fill_(float("nan"))
    if implementation.name != UNPACK:
        bucket.flat.fill_(float("nan"))
    implementation.prepare(bucket)()
    flat = bucket.flat_cast if implementation.name == PACK_CAST else bucket.flat
    slots = [flat[o : o + w.numel()] for o, w in zip(bucket.offsets, wanted, strict=True)]
    got = bucket.gradients if implementation.name == UNPACK else slots
    wrong = [i for i, (g, w) in enumerate(zip(got, wanted, strict=True)) if not torch.equal(g, w.to(g.dtype))]
    if wrong:
        raise RuntimeError(f"'{implementation.name}': gradients {wrong[:8]} of {len(wanted)} are not what was packed")


def batched(works: Sequence[Callable[[], object]], count: int, device: torch.device) -> Callable[[], object]:
    """`count` runs, the sets in turn; on a GPU as one graph, so that the host's own time is not measured."""

    def run_all() -> None:
        for index in range(count):
            works[index % len(works)]()

    if device.type != "cuda":
        return run_all
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for work in works:  # what a first call loads or allocates must not happen during the capture
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run_all()
    return graph.replay


def time_size(job: GpuJob, size_bytes: int, seconds: float, device: torch.device, report: Report) -> dict[str, Any]:
    """Times of one run of each implementation in ms, [implementation, round], in shuffled order."""
    numels = mixed_numels(size_bytes // 4)
    sets = set_count(2 * size_bytes, l2_bytes(device))
    generator = torch.Generator(device).manual_seed(job.seed)
    buckets = [Bucket.make(numels, device, generator) for _ in range(sets)]
    field = implementations(device)
    for implementation in field:
        check(implementation, buckets[0])
    count = repeats(2 * size_bytes, sets, TIMED_BYTES if device.type == "cuda" else 0)
    works = [batched([i.prepare(bucket) for bucket in buckets], count, device) for i in field]
    clock = Clock(device)
    shuffler, order = random.Random(job.seed), list(range(len(field)))
    for work in works:
        clock.time(work)
    rounds: list[list[float]] = []
    start_s = time.monotonic()
    while not enough(len(rounds), time.monotonic() - start_s, seconds):
        shuffler.shuffle(order)
        times_ms = [0.0] * len(field)
        for index in order:
            times_ms[index] = clock.time(works[index])[0] / count
        rounds.append(times_ms)
        report(time.monotonic() - start_s, seconds)
    return {
        "bytes": size_bytes,
        "elements": sum(numels),
        "tensors": len(numels),
        "sets": sets,
        "names": [i.name for i in field],
        "bytes_per_element": [i.bytes_per_element for i in field],
        "time_ms": np.array(rounds).T,
    }
