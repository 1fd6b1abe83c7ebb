"""Rank 0's numbers, on every rank."""

from __future__ import annotations

import datetime

import torch

from torchddp import _C


def of_rank_0(
    transport: _C.Transport, device: torch.device, timeout: datetime.timedelta, *values: float
) -> list[float]:
    """Collective: the values that rank 0 gave. ``device``: where the transport works; ``timeout``: zero for its own."""
    if transport.size == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    work = transport.make_work()
    transport.broadcast(tensor, 0, work)
    work.wait(timeout)
    return [float(value) for value in tensor.tolist()]
