"""Numbers of one rank, or of all, on every rank; over the transport, which is there whatever the process group is."""

from __future__ import annotations

import datetime
import zlib

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


def of_all_ranks(
    transport: _C.Transport, device: torch.device, timeout: datetime.timedelta, *values: float
) -> list[list[float]]:
    """Collective: what each rank gave, by rank; equally many on all."""
    if transport.size == 1:
        return [list(values)]
    source = torch.tensor(values, dtype=torch.float64, device=device)
    gathered = torch.empty(transport.size * len(values), dtype=torch.float64, device=device)
    work = transport.make_work()
    transport.all_gather(gathered, source, work)
    work.wait(timeout)
    rows: list[list[float]] = gathered.view(transport.size, len(values)).tolist()
    return rows


def ranks_per_host(transport: _C.Transport, device: torch.device, timeout: datetime.timedelta) -> int:
    """Collective: how many ranks the fullest host has."""
    mine = zlib.crc32(_C.host_identity().encode())
    hosts = [host for (host,) in of_all_ranks(transport, device, timeout, float(mine))]
    return max(hosts.count(host) for host in hosts)
