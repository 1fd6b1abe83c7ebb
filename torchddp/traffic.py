"""Bytes of a step's gradients: what was given to be reduced, and what this rank put on the wire for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchddp import _C

__all__ = ["OUTER", "Traffic", "of_model", "text_of", "total_wire_bytes"]

# Between hosts whose ranks share memory inside each. Its payload is a part of what "shm" was given.
OUTER = "outer"
_HOOK = "hook"


@dataclass(frozen=True)
class Traffic:
    """What one step sent over one transport, of one rank.

    Attributes:
        payload_bytes: of the gradients given to be reduced, as they lie in memory.
        wire_bytes: what this rank handed to the network or to shared memory for them, headers not counted; None if
            nobody can tell.
    """

    payload_bytes: int
    wire_bytes: int | None


def of_model(model: Any) -> dict[str, Traffic]:
    """What gradients sent in the model's last finished synchronised step, by transport. Not collective.

    * ``"c10d"``, ``"nccl"``: counted as the ring algorithms do it, 2 (W-1)/W of the payload for an all-reduce over W
      ranks; neither gloo nor NCCL can be asked. Other algorithms (NCCL's trees) may send something else.
    * ``"shm"``: bytes that this rank reads of other ranks' memory or writes to it.
    * ``"outer"``: what the rank sends to other hosts, where ranks of a host share memory; its payload is this rank's
      part of what ``"shm"`` was given.
    * ``"hook"``: under a communication hook what the hook's attribute ``traffic`` says, if it is a :class:`Traffic`;
      ``wire_bytes`` is None otherwise.

    Empty before the first such step. Steps under ``no_sync()`` send nothing, and leave it as it is. Not counted:
    buffers, parameters that ShardedDataParallel sends after a step, and messages about which parameters were used.

    Raises:
        TypeError: the model is no ``torchddp.DistributedDataParallel``.
        ValueError: torch's Python reducer does the model's work (or ``delay_all_reduce_named_params`` was given).
    """
    reducer = getattr(model, "reducer", None)
    if not isinstance(reducer, _C.Reducer):
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        raise TypeError(f"bytes are counted by the reducer of a torchddp.DistributedDataParallel; got {kind}")
    if model._use_python_reducer or model._delay_all_reduce_all_params:
        raise ValueError(
            "this model's gradients do not pass through torchddp's reducer (torch's Python reducer, or "
            "delay_all_reduce_named_params, reduces them), so their bytes are not counted"
        )
    counted = {route: Traffic(*given_and_sent) for route, given_and_sent in reducer.traffic().items()}
    if _HOOK in counted and model._comm_hooks:  # none of Python: torch's built-in ones
        said = getattr(model._comm_hooks[-1][0], "traffic", None)
        if isinstance(said, Traffic):
            counted[_HOOK] = said
    return counted


def total_wire_bytes(traffic: Mapping[str, Traffic]) -> int | None:
    """Over all transports; None if that of one is not known."""
    known = [each.wire_bytes for each in traffic.values() if each.wire_bytes is not None]
    return sum(known) if len(known) == len(traffic) else None


def text_of(traffic: Mapping[str, Traffic]) -> str:
    """Like "25.2 MB as gradients, 12.6 MB on the wire (shm)"; "nothing" if nothing was sent."""
    if not traffic:
        return "nothing"
    given = sum(each.payload_bytes for route, each in traffic.items() if route != OUTER)
    shown = {OUTER: "to other hosts"}
    sent = [f"{_mb(each.wire_bytes)} on the wire ({shown.get(route, route)})" for route, each in traffic.items()]
    return ", ".join([f"{_mb(given)} as gradients", *sent])


def _mb(count: int | None) -> str:
    return "?" if count is None else f"{count / 1e6:.3g} MB"
