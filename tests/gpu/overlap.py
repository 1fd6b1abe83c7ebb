"""How the collectives of a step overlap with its computation on a device."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.trace import DeviceEvent, is_collective


def is_computation(event: DeviceEvent) -> bool:
    """Whether this is one of the model's kernels: neither NCCL's nor one of our packing kernels."""
    return event.kind == "kernel" and not is_collective(event) and "torchddp" not in event.name


@dataclass(frozen=True)
class Overlap:
    """How the collectives of a step overlap with its computation."""

    collectives: int
    # On streams without computation.
    on_their_own_stream: int
    # Started before the last computation kernel ended.
    begun_before_the_end: int
    overlapped_us: float
    total_us: float


def _covered_us(event: DeviceEvent, others: Sequence[DeviceEvent]) -> float:
    """The part of this event during which any of the others, ordered by start, was running."""
    covered, reached = 0.0, event.start_us
    for other in others:
        begin, end = max(other.start_us, reached), min(other.end_us, event.end_us)
        if end > begin:
            covered += end - begin
            reached = end
    return covered


def overlap(events: Sequence[DeviceEvent]) -> Overlap:
    """The overlap of the collectives with the computation among these events."""
    collectives = [event for event in events if is_collective(event)]
    computation = [event for event in events if is_computation(event)]
    last_end_us = max((event.end_us for event in computation), default=float("-inf"))
    streams = {event.stream for event in computation}
    return Overlap(
        collectives=len(collectives),
        on_their_own_stream=sum(event.stream not in streams for event in collectives),
        begun_before_the_end=sum(event.start_us < last_end_us for event in collectives),
        overlapped_us=sum(_covered_us(event, computation) for event in collectives),
        total_us=sum(event.end_us - event.start_us for event in collectives),
    )
