"""The sizes of buckets that nobody has asked for: what suits the device and the transport."""

from __future__ import annotations

import datetime
import math
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchddp import _C
from torchddp.transport.agreement import TransportExchange
from torchddp.transport.message_cost import MessageLine, NoRoomError, measure_line

_MIB = 1024 * 1024
_DEFAULT_CAP_BYTES = 25 * _MIB
# Between CPU ranks a bucket of 25 MiB takes longer than the backward of the layers in it, and the last one hides
# behind nothing.
_CPU_CAP_BYTES = 8 * _MIB
# A CPU gradient this large is reduced where it lies, in a bucket of its own: a copy costs more than one more message.
_CPU_SOLO_BYTES = 1 * _MIB
# Over shared memory small buckets are best, which are reduced while they are in cache, where each rank has a processor:
# one costs about two microseconds and its bytes. With more ranks, and most of all where they take turns on processors,
# it costs up to hundreds: larger ones then, up to what is usual elsewhere.
_SHARED_CAP_BYTES, _LARGEST_SHARED_CAP_BYTES = 1 * _MIB, _DEFAULT_CAP_BYTES
_SHARED_SOLO_BYTES = 256 * 1024
# Of a bucket's time no more than this share goes to what it costs whatever its size; 1 MiB between two ranks with a
# processor each is just that.
_FIXED_SHARE = 1 / 8
_BUDGET_S = 0.005

# What rank 0 of a group has measured: models over one group share it.
_lines: weakref.WeakKeyDictionary[dist.ProcessGroup, MessageLine] = weakref.WeakKeyDictionary()


def default_sizes(
    parameters: Sequence[torch.Tensor],
    transport: _C.Transport,
    process_group: dist.ProcessGroup,
    timeout: datetime.timedelta = datetime.timedelta(0),
) -> tuple[list[int], int]:
    """Caps in bytes, the last one for all further buckets; from which size on a gradient has a bucket of its own.

    Equal on all ranks. Collective over shared memory, where the gradients fill more than the smallest bucket: takes
    some milliseconds the first time that a group asks. Sums don't depend on it, since they are made in rank order.

    Raises:
        TransportError: a peer is gone.
    """
    if not transport.reaches_any_memory:
        # Where one bucket holds all, nothing depends on what it costs.
        fits_one = sum(p.nbytes for p in parameters) <= _SHARED_CAP_BYTES
        line = None if fits_one else _line_of(process_group, transport, timeout)
        cap_bytes, solo_bytes = shared_sizes(line or MessageLine(0.0, 0.0))
        return [cap_bytes], solo_bytes
    on_cpu = all(p.device.type == "cpu" for p in parameters)
    cap_bytes = _CPU_CAP_BYTES if on_cpu else _DEFAULT_CAP_BYTES
    return [min(dist._DEFAULT_FIRST_BUCKET_BYTES, cap_bytes), cap_bytes], _CPU_SOLO_BYTES if on_cpu else 0


def shared_sizes(line: MessageLine) -> tuple[int, int]:
    """The cap, and the size of a gradient with a bucket of its own, for what a message costs. Pure.

    The cap is a power of two (or the largest there is), the nearest one, so that small errors of measurement change no
    bucket.
    """
    bytes_s = line.alpha_s * (1 / _FIXED_SHARE - 1)  # that the bytes of a bucket should take
    cap_bytes = _SHARED_CAP_BYTES
    while cap_bytes < _LARGEST_SHARED_CAP_BYTES and cap_bytes * math.sqrt(2) * line.beta_s_per_byte < bytes_s:
        cap_bytes *= 2
    cap_bytes = min(cap_bytes, _LARGEST_SHARED_CAP_BYTES)
    # To copy a byte takes about as long as to reduce it: each rank reads and writes as many. So from here on the copy
    # costs more than one more message.
    return cap_bytes, max(_SHARED_SOLO_BYTES, int(cap_bytes * _FIXED_SHARE))


def _line_of(
    process_group: dist.ProcessGroup, transport: _C.Transport, timeout: datetime.timedelta
) -> MessageLine | None:
    """Collective: what was measured for the group, or is now; None where there was no room for it."""
    if transport.size == 1:
        return None
    # Rank 0 alone decides: another may have lost what it knew, if measuring failed there at the end.
    known = _lines.get(process_group, MessageLine(math.nan, math.nan, math.nan))
    exchange = TransportExchange(transport, float, torch.device("cpu"), timeout)
    line = MessageLine(*exchange.of_rank_0(known))
    if math.isnan(line.alpha_s):
        try:
            line = measure_line(transport, torch.device("cpu"), timeout, _BUDGET_S)
        except NoRoomError:
            return None  # the reducer will find that out, and take the fallback
        _lines[process_group] = line
    return line
