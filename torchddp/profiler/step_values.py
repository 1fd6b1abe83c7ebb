"""`monitor(model, callback)`: passes step times to a logger, cheaply enough to leave on."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.hooks import RemovableHandle

from torchddp.ddp.module import DistributedDataParallel
from torchddp.profiler.session import checked_model
from torchddp.traffic import Traffic, total_wire_bytes

Callback = Callable[[int, dict[str, float]], None]


def monitor(model: DistributedDataParallel, callback: Callback, every: int = 1) -> Monitor:
    """Call `callback(step, values)` after every `every`-th synchronized step, at the start of the next forward.

    Example:

        torchddp.profiler.monitor(model, lambda step, values: wandb.log(values, step=step), every=50)

    `values` describe that step on this rank (for a model on a GPU, times are the host's):

    * ``ddp/step_ms``: from the start of forward until gradients are final
    * ``ddp/forward_ms``: until the first gradient; ``ddp/backward_ms``: from there to the last one
    * ``ddp/comm_ms``: from the first bucket's launch until the last one is reduced
    * ``ddp/exposed_ms``: the part of that after the last gradient
    * ``ddp/overlap_ratio``: the share of the communication before the last gradient; 1.0 if there was none
    * ``ddp/buckets``: how many were reduced; ``ddp/bytes``: their size in memory
    * ``ddp/wire_bytes``: what the rank sent for them (`torchddp.traffic`); missing if unknown

    The reducer measures these times anyway. Not collective. An exception of the callback leaves the forward.

    Returns:
        A handle; its `remove()` ends the callbacks.

    Raises:
        TypeError: the model is not a `torchddp.DistributedDataParallel`, or the callback can't be called.
        ValueError: `every` is less than 1, or the model's gradients do not pass through torchddp's reducer.
    """
    ddp = checked_model(model)
    if not callable(callback):
        raise TypeError(f"callback must be a function of (step, values), got {type(callback).__name__}")
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}")
    watching = Monitor(callback, every, ddp.reducer.stats()["finished"])
    watching._handle = ddp.register_forward_pre_hook(watching)
    return watching


class Monitor:
    """A forward pre-hook, created by `monitor`."""

    def __init__(self, callback: Callback, every: int, finished: int) -> None:
        self._callback = callback
        self._every = every
        self._told = finished  # the count of finished steps when the callback was last called
        self._forwards = 0  # since then; at least as many as finished steps
        self._handle: RemovableHandle  # set by `monitor`

    def __call__(self, module: DistributedDataParallel, inputs: object) -> None:
        """Count a forward of the module; read the reducer's statistics only when a callback may be due."""
        if self._forwards < self._every:
            self._forwards += 1
            return
        stats = module.reducer.stats()
        finished = stats["finished"]
        self._told = min(self._told, finished)  # a copy of a module counts from zero again
        if finished - self._told < self._every:  # forwards without backward, or under no_sync
            self._forwards = finished - self._told + 1
            return
        self._told, self._forwards = finished, 1
        self._callback(finished, values_of(stats, module.traffic()))

    def remove(self) -> None:
        """End the callbacks."""
        self._handle.remove()


def values_of(stats: dict[str, int], traffic: dict[str, Traffic]) -> dict[str, float]:
    """The callback's values, from the reducer's statistics (ns) and the traffic of its last step."""
    forward_ns, backward_ns = stats["forward_compute_time"], stats["backward_compute_time"]
    comm_ns, exposed_ns = stats["backward_comm_time"], stats["exposed_comm_time"]
    overlap_ns = stats["backward_compute_comm_overlap_time"]
    wire_bytes = total_wire_bytes(traffic)
    return {
        "ddp/step_ms": (forward_ns + backward_ns + exposed_ns) / 1e6,
        "ddp/forward_ms": forward_ns / 1e6,
        "ddp/backward_ms": backward_ns / 1e6,
        "ddp/comm_ms": comm_ns / 1e6,
        "ddp/exposed_ms": exposed_ns / 1e6,
        "ddp/overlap_ratio": min(overlap_ns, comm_ns) / comm_ns if comm_ns else 1.0,
        "ddp/buckets": stats["num_buckets_reduced"],
        "ddp/bytes": stats["bytes_reduced"],
        **({} if wire_bytes is None else {"ddp/wire_bytes": wire_bytes}),
    }
