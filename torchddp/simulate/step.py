"""One training step, event by event: gradients become ready, buckets leave in turn over one channel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """A bucket's all-reduce. Seconds: when it is ready if nothing is sent meanwhile; how long it takes; CPU time."""

    ready_s: float
    duration_s: float
    host_s: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """When each message began and ended, and when all was over; seconds since backward began."""

    spans: tuple[tuple[float, float], ...]
    end_s: float


def run_backward(backward_s: float, messages: Iterable[Message], *, shared_cpu: bool) -> Timeline:
    """Backward with its messages, each of which waits for its gradients and for the message before it.

    With `shared_cpu`, CPU time of the messages is taken from compute: until compute ends the core is never idle, so
    after messages that needed h seconds of it compute lags by h, and what becomes ready then is late by as much.
    """
    free_s = lag_s = 0.0
    spans = []
    for message in messages:
        start_s = max(free_s, message.ready_s + lag_s)
        free_s = start_s + message.duration_s
        spans.append((start_s, free_s))
        if shared_cpu:
            # A message cannot burn more than its own time of one core.
            lag_s += min(message.host_s, message.duration_s)
    return Timeline(tuple(spans), max(backward_s + lag_s, free_s))
