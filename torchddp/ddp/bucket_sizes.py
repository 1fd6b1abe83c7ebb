"""Default bucket sizes, chosen for the device and the transport."""

from __future__ import annotations

import datetime
import math
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchddp import _C, _torch
from torchddp.transport.agreement import TransportExchange
from torchddp.transport.message_cost import MessageLine, NoRoomError, measure_line

_MIB = 1024 * 1024
_DEFAULT_CAP_BYTES = 25 * _MIB
# Between CPU ranks, reducing 25 MiB takes longer than the backward of its layers, and nothing overlaps the last bucket.
_CPU_CAP_BYTES = 8 * _MIB
# A CPU gradient of at least this size gets its own bucket and is reduced in place: a copy costs more than a message.
_CPU_SOLO_BYTES = 1 * _MIB
# Over shared memory, small buckets that stay in cache are fastest as long as each rank has its own core: a message
# costs about 2 us plus its bytes. With more ranks, and especially when ranks share cores, it can cost hundreds of
# microseconds, and larger buckets pay off, up to the default size.
_SHARED_CAP_BYTES, _LARGEST_SHARED_CAP_BYTES = 1 * _MIB, _DEFAULT_CAP_BYTES
_SHARED_SOLO_BYTES = 256 * 1024
# A message's fixed cost may take at most this share of a bucket's time: 1 MiB for two ranks with a core each.
_FIXED_SHARE = 1 / 8
_BUDGET_S = 0.005
_FREE = MessageLine(0.0, 0.0)

# The message cost measured for each group, shared by all models over it.
_lines: weakref.WeakKeyDictionary[dist.ProcessGroup, MessageLine] = weakref.WeakKeyDictionary()


def default_sizes(
    parameters: Sequence[torch.Tensor],
    transport: _C.Transport,
    process_group: dist.ProcessGroup,
    timeout: datetime.timedelta = datetime.timedelta(0),
    first_bytes: int = _torch.FIRST_BUCKET_BYTES,
) -> tuple[list[int], int]:
    """Return bucket caps in bytes (the last one repeats) and the size from which a gradient gets its own bucket.

    ``first_bytes``: the first bucket's cap, where ranks share no memory; the same on all ranks.

    Equal on all ranks. Collective over shared memory if the gradients exceed the smallest bucket; the first call for a
    group takes a few milliseconds. Averages do not depend on the bucket sizes, because sums are formed in rank order.

    Raises:
        TransportError: a peer died or did not arrive in time.
    """
    if not transport.reaches_any_memory:
        # If one bucket holds everything, the cost of a message does not matter.
        fits_one = sum(p.nbytes for p in parameters) <= _SHARED_CAP_BYTES
        line = _FREE if fits_one else _line_of(process_group, transport, timeout)
        cap_bytes, solo_bytes = shared_sizes(line)
        return [cap_bytes], solo_bytes
    on_cpu = all(p.device.type == "cpu" for p in parameters)
    cap_bytes = _CPU_CAP_BYTES if on_cpu else _DEFAULT_CAP_BYTES
    return [min(first_bytes, cap_bytes), cap_bytes], _CPU_SOLO_BYTES if on_cpu else 0


def shared_sizes(line: MessageLine) -> tuple[int, int]:
    """Return the cap, and the size from which a gradient gets its own bucket, for a given message cost. Pure.

    The cap is rounded to the nearest power of two (or to the maximum), so that small measurement errors change nothing.
    """
    bytes_s = line.alpha_s * (1 / _FIXED_SHARE - 1)  # the time that a bucket's bytes should take
    cap_bytes = _SHARED_CAP_BYTES
    while cap_bytes < _LARGEST_SHARED_CAP_BYTES and cap_bytes * math.sqrt(2) * line.beta_s_per_byte < bytes_s:
        cap_bytes *= 2
    cap_bytes = min(cap_bytes, _LARGEST_SHARED_CAP_BYTES)
    # Copying a byte takes about as long as reducing it: from this size on, a copy costs more than a message.
    return cap_bytes, max(_SHARED_SOLO_BYTES, int(cap_bytes * _FIXED_SHARE))


def _line_of(process_group: dist.ProcessGroup, transport: _C.Transport, timeout: datetime.timedelta) -> MessageLine:
    """The group's measured message cost; none if shared memory has no room for the measurement. Collective."""
    # Only rank 0's result counts: another rank may have none if its measurement failed at the very end.
    known = _lines.get(process_group, MessageLine(math.nan, math.nan, math.nan))
    line = MessageLine(*TransportExchange(transport, float, torch.device("cpu"), timeout).of_rank_0(known))
    if math.isnan(line.alpha_s):
        try:
            line = measure_line(transport, torch.device("cpu"), timeout, _BUDGET_S)
        except NoRoomError:
            return _FREE  # the reducer detects this too and falls back
        _lines[process_group] = line
    return line
