"""One rank's parameters and buffers, sent to all ranks."""

from __future__ import annotations

import datetime

import torch
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from torchddp import _C, _torch
from torchddp.ddp import model


def broadcast_over(ddp: TorchDDP, transport: _C.Transport, limit: datetime.timedelta) -> _C.TensorBroadcast:
    return _C.TensorBroadcast(transport, ddp.broadcast_bucket_size, limit)


def send_states(
    ddp: TorchDDP, transport: _C.Transport, states: list[torch.Tensor], src: int, limit: datetime.timedelta
) -> _C.Transport:
    """Send one rank's values of these tensors to all ranks, in place. Collective.

    Returns the transport, or its replacement if some rank had no room for a message.
    """
    if transport.size == 1 or not states:
        return transport
    if not _C.can_travel_as_bytes(states):
        _torch.broadcast_coalesced(ddp.process_group, states, ddp.broadcast_bucket_size, src)
        return transport
    model.check_can_be_received(ddp.module, states)
    broadcast = broadcast_over(ddp, transport, limit)
    broadcast.reserve(states)
    agreed = _C.agree_on_memory(transport, limit)
    (broadcast if agreed is transport else broadcast_over(ddp, agreed, limit)).run(states, src)
    return agreed
