"""A model's steps and the process's notices as instruments of OpenTelemetry: docs/monitoring.md."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import deque
from typing import Final

import torch.distributed as dist

from torchddp import notices
from torchddp.ddp.module import DistributedDataParallel
from torchddp.transport.worker import watch

try:
    from opentelemetry import metrics
except ModuleNotFoundError as error:
    raise ImportError(
        "torchddp.profiler.monitor without a callback needs OpenTelemetry: "
        "pip install opentelemetry-api opentelemetry-sdk"
    ) from error

logger = logging.getLogger(__name__)

# From 0.1 ms to 50 s: OpenTelemetry's default ones suit milliseconds.
_BOUNDARIES_S = [m * 10.0**e for e in range(-4, 2) for m in (1, 2, 5)]
_COUNTED: Final[dict[notices.Kind, tuple[str, str, str]]] = {
    "hang_report": ("torchddp.hang_reports", "{report}", "Hang reports, by the rank that printed them"),
    "straggler": ("torchddp.stragglers", "{report}", "Findings that one rank holds up the others"),
    "stop_request": ("torchddp.stop_requests", "{request}", "Requests to end the training early"),
    "retry": ("torchddp.retries", "{retry}", "Steps or averages that failed and are done again, under torchft"),
}
_EVERY_S = 1.0
Attributes = dict[str, str | int]
_Step = tuple[int, dict[str, float], Attributes]  # the count of finished steps, and what a callback gets
# Those that are open, oldest first.
_open: list[Telemetry] = []


class Telemetry:
    """The callback of a monitor. It does not keep the model alive."""

    def __init__(self, ddp: DistributedDataParallel, provider: metrics.MeterProvider | None) -> None:
        self._model = weakref.ref(ddp)
        self._finished = ddp.reducer.stats()["finished"]
        self._attributes = _attributes_of(ddp)
        self._buckets_now = 0, self._attributes
        self._pending: deque[_Step] = deque()
        self._has_failed = False
        self._lock = threading.RLock()  # close() passes on the last steps
        self.provider = metrics.get_meter_provider() if provider is None else provider
        meter = self.provider.get_meter("torchddp")
        self._duration, self._exposed = (
            meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=_BOUNDARIES_S)
            for name, text in (
                ("torchddp.step.duration", "From the start of forward until the gradients are final"),
                ("torchddp.communication.exposed", "From the last gradient until the gradients are final"),
            )
        )
        self._steps = meter.create_counter("torchddp.steps", "{step}", "Synchronized steps")
        self._sent = meter.create_counter("torchddp.communication.sent", "By", "Bytes that the rank sent for gradients")
        self._buckets = meter.create_up_down_counter("torchddp.buckets", "{bucket}", "Buckets reduced in the last step")
        self._counters = {kind: meter.create_counter(*named) for kind, named in _COUNTED.items()}
        for counter in (self._steps, self._sent, *self._counters.values()):
            counter.add(0, self._attributes)  # so that an increase is seen from the first one on
        _open.append(self)
        self._stop_listening = notices.listen(self._count)
        self._task = watch(self._pass_on, _EVERY_S)

    def __call__(self, finished: int, values: dict[str, float]) -> None:
        self._pending.append((finished, values, self._attributes))
        # The group may change between this step and the next.
        if (ddp := self._model()) is not None:
            self._attributes = _attributes_of(ddp)

    def _pass_on(self) -> None:
        """On the watcher: OpenTelemetry's SDK takes too long for the thread that trains."""
        with self._lock:
            steps = [self._pending.popleft() for _ in range(len(self._pending))]
            try:
                for labels, same in itertools.groupby(steps, lambda step: tuple(step[2].items())):
                    self._record(list(same), dict(labels))
                if self not in _open:
                    self._set_buckets(0, self._attributes)
            except Exception:  # of the program's exporter: training and later steps go on
                if not self._has_failed:
                    logger.exception("OpenTelemetry refuses a model's steps; later failures are not logged")
                self._has_failed = True
        if self._model() is None:
            self.close()

    def _record(self, steps: list[_Step], attributes: Attributes) -> None:
        count = sent = 0
        for finished, values, _ in steps:
            self._duration.record(values["ddp/step_ms"] / 1e3, attributes)
            self._exposed.record(values["ddp/exposed_ms"] / 1e3, attributes)
            # Several if the program also calls model.reduce(): all count as the last one. A new reducer counts from 0.
            several, self._finished = max(1, finished - self._finished), finished
            count += several
            sent += several * int(values.get("ddp/wire_bytes", 0))
        self._steps.add(count, attributes)
        self._sent.add(sent, attributes)
        self._set_buckets(int(steps[-1][1]["ddp/buckets"]), attributes)

    def _set_buckets(self, count: int, attributes: Attributes) -> None:
        before, of = self._buckets_now
        if (count, attributes) != (before, of):
            self._buckets.add(-before, of)
            self._buckets.add(count, attributes)
            self._buckets_now = count, attributes

    def _count(self, notice: notices.Notice) -> None:
        """Notices are the process's: of several monitors with the same provider, the oldest counts them."""
        if notice.kind in self._counters and next(each for each in _open if each.provider is self.provider) is self:
            self._counters[notice.kind].add(1, self._attributes)

    def close(self) -> None:
        with self._lock:
            if self in _open:
                self._stop_listening()
                _open.remove(self)
                self._task.close()
                self._pass_on()


def _attributes_of(ddp: DistributedDataParallel) -> Attributes:
    group = ddp.process_group
    return {
        "rank": dist.get_rank() if dist.is_initialized() else group.rank(),  # unique, unlike that in a group of several
        "world_size": group.size(),
        "transport": ddp.reducer.transport_name,
        "model": type(ddp.module).__name__,
    }
