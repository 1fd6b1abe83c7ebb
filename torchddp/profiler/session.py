"""`profile(model)`: records the timeline of a model's steps, reports it and exports it; `monitor(model)`."""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from torchddp import _torch
from torchddp.ddp.module import DistributedDataParallel
from torchddp.errors import check_count
from torchddp.profiler import ranks
from torchddp.profiler.export import chrome_trace, write_chrome_trace
from torchddp.profiler.numbers import profile_numbers
from torchddp.profiler.ranks import Clock, MergedProfile, RankRecord, merge
from torchddp.profiler.steps import BucketLayout, Layout, Step, layout_at, overlap_ratio, read_steps
from torchddp.traffic import Traffic, check_reduces, total_wire_bytes
from torchddp.transport.agreement import GroupExchange

DEFAULT_STEPS = 64
# Per step: forward_begin, backward_begin, backward_end; per parameter: its gradient, and up to four of its bucket.
_EVENTS_PER_STEP, _EVENTS_PER_PARAMETER = 3, 5

_profiled: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def checked_model(model: object) -> DistributedDataParallel:
    """The model, or a replicated module's engine. TypeError or ValueError if it has no reducer of torchddp's."""
    if isinstance(model, torch.nn.Module) and not isinstance(model, DistributedDataParallel):
        from torchddp.composable.module import find_state  # takes long

        state = find_state(model)
        model = model if state is None else state.engine
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            "torchddp.profiler needs a torchddp.DistributedDataParallel or a replicated module, whose reducer measures "
            f"the times; got {torch.typename(model)}"
        )
    check_reduces(model)
    return model


@contextmanager
def profile(model: torch.nn.Module, steps: int | None = None) -> Iterator[Profile]:
    """Record when each gradient was ready and each bucket packed, launched and done, in every step of the context.

    Example:

        with torchddp.profiler.profile(model) as recorded:
            for batch in batches:
                loss_of(model(batch)).backward()
        print(recorded.report())                      # this rank
        print(recorded.report(merged=True))           # all ranks, and the straggler; collective
        recorded.export_chrome_trace("trace.json")    # for https://ui.perfetto.dev

    A step is a synchronized forward and backward; nothing under `no_sync()` is recorded. An event costs one reading of
    the clock (tens of nanoseconds). For a model on a GPU, times are the host's. Not collective.

    Args:
        model: a `torchddp.DistributedDataParallel`, or a module given to `torchddp.replicate`.
        steps: how many steps to keep, the last ones, at 80 bytes per parameter and step. None: 64.

    Raises:
        TypeError: another kind of model, such as torch's own class.
        ValueError: `steps` is less than 1, or the model's gradients do not pass through torchddp's reducer.
        RuntimeError: the model is being profiled already.
    """
    ddp = checked_model(model)
    if steps is not None:
        check_count("steps", steps, 1)
    if ddp in _profiled:
        raise RuntimeError("this model is being profiled already: end that profile first")
    recorded = Profile(ddp, DEFAULT_STEPS if steps is None else steps)
    _profiled.add(ddp)
    try:
        yield recorded
    finally:
        recorded._stop()
        _profiled.discard(ddp)


class Profile:
    """One rank's steps, recorded by `profile`; complete when its context has ended."""

    def __init__(self, model: DistributedDataParallel, steps: int) -> None:
        self._model = model
        self._kept_steps = steps
        self._reducer = model.reducer  # refresh_trainable() replaces it, which ends the recording
        # Names of the reduced parameters, to which the steps refer by index.
        self.names: tuple[str, ...] = tuple(spec.name for spec in model.session.specs)
        self._layouts: list[tuple[int, Layout]] = []
        self._final: RankRecord | None = None  # once the context has ended
        self()
        self._reducer.enable_timeline(steps * (_EVENTS_PER_STEP + _EVENTS_PER_PARAMETER * len(self.names)))
        # After each forward, because buckets are rebuilt early in a run, at the start of a forward.
        self._hook = model._called.register_forward_hook(self)

    def _stop(self) -> None:
        self._reducer.disable_timeline()
        self._hook.remove()
        self._final = self._record()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _OfACopy, ()

    def __call__(self, *_: object) -> None:
        """The hook after each forward: note the buckets if they are new."""
        reducer = self._reducer
        layout: Layout = tuple(BucketLayout(tuple(b.params), b.nbytes) for b in reducer.plan.buckets)
        if not self._layouts or self._layouts[-1][1] != layout:
            self._layouts.append((reducer.stats()["iteration"], layout))

    @property
    def steps(self) -> tuple[Step, ...]:
        """This rank's complete steps, oldest first; only the last ones if there were more than `profile` keeps."""
        return self._record().steps

    @property
    def dropped(self) -> int:
        """Events of earlier steps that were overwritten by later ones."""
        return self._record().dropped

    @property
    def incomplete(self) -> int:
        """Steps recorded only in part: overwritten by later ones, begun before the context, or ended by an error."""
        return self._record().incomplete

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What this rank sent for the gradients of the last step, by transport: see `torchddp.traffic.of_model`."""
        return self._record().traffic

    def _record(self) -> RankRecord:
        if self._final is not None:
            return self._final
        reducer = self._reducer
        read = read_steps(reducer.timeline(), lambda step: layout_at(step, self._layouts))
        return RankRecord(
            rank=self._model.process_group.rank(),
            host=socket.gethostname(),
            clock_identity=ranks.clock_identity(),
            names=self.names,
            steps=read.complete[-self._kept_steps :],
            dropped=reducer.timeline_dropped(),
            incomplete=read.incomplete,
            traffic=self._model.traffic(),
        )

    def gather(self) -> MergedProfile:
        """Merge all ranks' steps on one clock. Collective over the model's process group, between steps.

        Raises ValueError on all ranks if no step was recorded completely on every rank.
        """
        group = self._model.process_group
        exchange = GroupExchange(group)
        records = exchange.gather(self._record())
        identities = [record.clock_identity for record in records]
        readings: list[Any] = [()] * group.size()
        if len(set(identities)) > 1:
            device = self._model.device if dist.get_backend(group).startswith("nccl") else "cpu"
            readings = exchange.gather(ranks.take_readings(group, device))
        return merge(records, ranks.align(identities, readings))

    def report(self, merged: bool = False) -> str:
        """The median step as text of at most 80 columns: each bucket's times and delays, and exposed communication.

        With `merged=True`, over all ranks, and with the straggler: collective, and the same on all ranks.

        Raises ValueError if no complete step was recorded; ImportError without rich.
        """
        from torchddp.profiler.report import as_text, report

        return as_text(report(profile_numbers(self._merged(merged))))

    def export_chrome_trace(self, path: str | Path, merged: bool = False) -> None:
        """Write all steps in Chrome's trace format, for https://ui.perfetto.dev or chrome://tracing.

        With `merged=True`, write the steps of all ranks: collective; rank 0 writes.

        Raises ValueError if no complete step was recorded.
        """
        profile = self._merged(merged)
        if not merged or self._model.process_group.rank() == 0:
            write_chrome_trace(Path(path), chrome_trace(profile, profile.steps))

    def _merged(self, all_ranks: bool) -> MergedProfile:
        return self.gather() if all_ranks else merge([self._record()], [Clock()])


# --- step times for a logger ---


Callback = Callable[[int, dict[str, float]], object]


def monitor(
    model: torch.nn.Module, callback: Callback | None = None, every: int = 1, *, meter_provider: Any = None
) -> Monitor:
    """Pass on each step's numbers while the model trains: to OpenTelemetry, or to ``callback``.

    Without a callback, they go to the metrics API of OpenTelemetry, and from there to Prometheus, an OTLP collector or
    whatever the program has set up: see docs/monitoring.md for the instruments.

    Example:

        monitor = torchddp.profiler.monitor(model)  # call monitor.close() at the end, or use it in a `with`

    With one, ``callback(step, values)`` is called for every ``every``-th synchronized step. ``values`` describe that
    step on this rank (for a model on a GPU, times are the host's):

    * ``ddp/step_ms``: from the start of forward until gradients are final
    * ``ddp/forward_ms``: until the first gradient; ``ddp/backward_ms``: from there to the last one
    * ``ddp/comm_ms``: from the first bucket's launch until gradients are final
    * ``ddp/exposed_ms``: the part of that after the last gradient
    * ``ddp/overlap_ratio``: the share of the communication before the last gradient; 1.0 if there was none
    * ``ddp/buckets``: how many were reduced; ``ddp/bytes``: their size in memory
    * ``ddp/wire_bytes``: what the rank sent for them (`torchddp.traffic`); missing if unknown

    The reducer measures these times anyway. A step is passed on at the start of the next forward, or by ``close()``.
    Not collective. An exception of the callback leaves the forward. A copy of the model is not monitored.

    Args:
        model: a `torchddp.DistributedDataParallel`, or a module given to `torchddp.replicate`.
        callback: a function of (step, values), such as ``lambda step, values: wandb.log(values, step=step)``.
        every: steps per call of ``callback``. OpenTelemetry gets all steps.
        meter_provider: an OpenTelemetry ``MeterProvider``. None: the global one.

    Raises:
        TypeError: the model is neither of those, or the callback can't be called.
        ValueError: `every` is less than 1, or another one than 1 without a callback; a callback and a `meter_provider`;
            or the model's gradients do not pass through torchddp's reducer.
        ImportError: opentelemetry-api is not installed, and there is no callback.
    """
    ddp = checked_model(model)
    check_count("every", every, 1)
    if callback is None:
        if every != 1:
            raise ValueError(f"every={every} needs a callback: OpenTelemetry gets all steps")
        from torchddp.profiler.telemetry import Telemetry

        exported = Telemetry(ddp, meter_provider)
        return Monitor(ddp, exported, 1, exported.close)
    if not callable(callback):
        raise TypeError(f"callback must be a function of (step, values), got {type(callback).__name__}")
    if meter_provider is not None:
        raise ValueError("a callback and a meter_provider were given: call monitor once for each")
    return Monitor(ddp, callback, every)


class Monitor:
    """A forward pre-hook, created by `monitor`. It ends at the end of its context, if used as one, or by `close`."""

    def __init__(
        self, ddp: DistributedDataParallel, callback: Callback, every: int, end: Callable[[], None] | None = None
    ) -> None:
        self._model = weakref.ref(ddp)
        self._callback = callback
        self._every = every
        self._end = end
        self._reported = ddp.reducer.stats()["finished"]  # the count of finished steps at the last call of the callback
        self._forwards = 0  # since then; at least as many as finished steps
        self._handle: RemovableHandle | None = ddp._called.register_forward_pre_hook(self)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _OfACopy, ()

    @_torch.disable_dynamo(recursive=True)
    def __call__(self, module: Any, inputs: Any) -> None:
        """Count a forward of the module; read the reducer's statistics only when a callback may be due."""
        if self._forwards < self._every:
            self._forwards += 1
        else:
            self._report()

    def _report(self) -> None:
        ddp = self._model()
        if ddp is None:
            return
        stats = ddp.reducer.stats()
        finished = stats["finished"]
        self._reported = min(self._reported, finished)  # a new reducer counts from zero again
        if finished - self._reported < self._every:  # forwards without backward, or under no_sync
            self._forwards = finished - self._reported + 1
            return
        self._reported, self._forwards = finished, 1
        self._callback(finished, values_of(stats, ddp.traffic()))

    def close(self) -> None:
        """Pass on the last step, if it is due and has not been yet, and end."""
        if self._handle is None:
            return
        self._handle.remove()
        self._handle = None
        self._report()
        if self._end is not None:
            self._end()


class _OfACopy:
    """The hook of a copy, which is neither profiled nor monitored."""

    def __call__(self, *_: object) -> None: ...


def values_of(stats: dict[str, int], traffic: dict[str, Traffic]) -> dict[str, float]:
    """The callback's values, from the reducer's statistics (ns) and the traffic of its last step."""
    forward_ns, backward_ns = stats["forward_compute_time"], stats["backward_compute_time"]
    exposed_ns, sent = stats["exposed_comm_time"], stats["backward_comm_time"] > 0
    hidden_ns = min(stats["backward_compute_comm_overlap_time"], stats["backward_comm_time"])
    comm_ns = hidden_ns + exposed_ns if sent else 0
    wire_bytes = total_wire_bytes(traffic)
    return {
        "ddp/step_ms": (forward_ns + backward_ns + exposed_ns) / 1e6,
        "ddp/forward_ms": forward_ns / 1e6,
        "ddp/backward_ms": backward_ns / 1e6,
        "ddp/comm_ms": comm_ns / 1e6,
        "ddp/exposed_ms": exposed_ns / 1e6,
        "ddp/overlap_ratio": overlap_ratio(hidden_ns, comm_ns),
        "ddp/buckets": stats["num_buckets_reduced"],
        "ddp/bytes": stats["bytes_reduced"],
        **({} if wire_bytes is None else {"ddp/wire_bytes": wire_bytes}),
    }
