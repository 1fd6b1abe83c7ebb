"""Bytes per step: the gradients given to the reducer, and what this rank sent for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp import _C

# Between hosts, if the ranks of a host share memory. Its payload is part of the payload of "shm".
OUTER = "outer"
_HOOK = "hook"


@dataclass(frozen=True)
class Traffic:
    """What one rank sent in one step over one transport.

    Attributes:
        payload_bytes: size of the gradients to be reduced, as stored in memory.
        wire_bytes: what this rank passed to the network or to shared memory for them, without headers; None if unknown.
    """

    payload_bytes: int
    wire_bytes: int | None


def of_model(model: TorchDDP) -> dict[str, Traffic]:
    """What this rank sent for gradients in the model's last finished synchronized step, by transport. Not collective.

    * ``"c10d"``, ``"nccl"``: computed for ring algorithms, 2 (W-1)/W of the payload for an all-reduce over W ranks,
      since neither gloo nor NCCL reports it. Other algorithms (NCCL's trees) may send a different amount.
    * ``"shm"``: bytes that this rank reads from or writes to other ranks' memory.
    * ``"outer"``: bytes that this rank sends to other hosts if the ranks of a host share memory; its payload is part of
      ``"shm"``'s.
    * ``"hook"``: with a communication hook: its attribute ``traffic``, a :class:`Traffic`; or else ``wire_bytes`` is
      None.

    Empty before the first such step. Steps under ``no_sync()`` send nothing and don't change it. Not included: buffers,
    parameters that ShardedDataParallel sends after a step, and the exchange of used parameters.

    Raises:
        TypeError: the model is not a ``torchddp.DistributedDataParallel``.
        ValueError: torch's Python reducer is used.
    """
    reducer = getattr(model, "reducer", None)
    if not isinstance(reducer, _C.Reducer):
        given = torch.typename(model)
        raise TypeError(f"bytes are counted by the reducer of a torchddp.DistributedDataParallel; got {given}")
    check_reduces(model)
    counted = {route: Traffic(*given_and_sent) for route, given_and_sent in reducer.traffic().items()}
    if _HOOK in counted and model._comm_hooks:  # empty for torch's built-in hooks
        said = getattr(model._comm_hooks[-1][0], "traffic", None)
        if isinstance(said, Traffic):
            counted[_HOOK] = said
    return counted


def check_reduces(model: TorchDDP) -> None:
    """ValueError if something other than torchddp's reducer, which measures times and bytes, gets the gradients."""
    if model._use_python_reducer:
        raise ValueError(
            "this model's gradients do not pass through torchddp's reducer (torch's Python reducer reduces them), so "
            "there are no times or bytes to report"
        )


def total_wire_bytes(traffic: Mapping[str, Traffic]) -> int | None:
    """The sum over all transports; None if one of them is unknown."""
    known = [each.wire_bytes for each in traffic.values() if each.wire_bytes is not None]
    return sum(known) if len(known) == len(traffic) else None
