"""How large buckets are: what the user asked for, or what suits the transport."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchddp import _C

# As bucket_cap_mb: planned from measurements (torchddp.plan).
AUTO = "auto"
_MIB = 1024 * 1024
_DEFAULT_CAP_BYTES = 25 * _MIB
# Between CPU ranks a bucket of 25 MiB takes longer than the backward of the layers in it, and the last one hides
# behind nothing.
_CPU_CAP_BYTES = 8 * _MIB
# A CPU gradient this large is reduced where it lies, in a bucket of its own: a copy costs more than one more message.
_CPU_SOLO_BYTES = 1 * _MIB
# Over shared memory a bucket costs about a microsecond: small ones, which are reduced while they are in cache.
_SHARED_CAP_BYTES = 1 * _MIB
_SHARED_SOLO_BYTES = 256 * 1024


def check_caps(bucket_cap_mb: float | str | None, bucket_cap_mb_list: Sequence[float] | None) -> None:
    """ValueError for another text than "auto", what is not positive, or both kinds of caps; TypeError for no number."""
    if isinstance(bucket_cap_mb, str):
        if bucket_cap_mb != AUTO:
            raise ValueError(f"bucket_cap_mb must be a number of MiB, None or {AUTO!r}, got {bucket_cap_mb!r}")
        if bucket_cap_mb_list:
            raise ValueError(f"bucket_cap_mb={AUTO!r} chooses the buckets itself: leave bucket_cap_mb_list out")
        bucket_cap_mb = None
    caps: list[tuple[str, Any]] = [("bucket_cap_mb_list", cap) for cap in bucket_cap_mb_list or []]
    for name, cap in [("bucket_cap_mb", bucket_cap_mb), *caps]:
        if cap is None:
            continue
        if not isinstance(cap, numbers.Real):  # numpy's are as well
            error = ValueError if isinstance(cap, str) else TypeError
            raise error(f"{name} must be a number of MiB, got {cap!r}")
        if not float(cap) > 0:
            raise ValueError(f"{name} must be a positive number of MiB, got {cap!r}")


def choose(
    asked_for_mb: Sequence[float], parameters: Sequence[torch.Tensor], transport: _C.Transport
) -> tuple[list[int], int]:
    """Caps in bytes, the last one for all further buckets; from which size on a gradient has a bucket of its own."""
    if asked_for_mb:
        return [max(1, int(cap * _MIB)) for cap in asked_for_mb], 0
    if not transport.reaches_any_memory:
        return [_SHARED_CAP_BYTES], _SHARED_SOLO_BYTES
    on_cpu = all(p.device.type == "cpu" for p in parameters)
    cap_bytes = _CPU_CAP_BYTES if on_cpu else _DEFAULT_CAP_BYTES
    return [min(dist._DEFAULT_FIRST_BUCKET_BYTES, cap_bytes), cap_bytes], _CPU_SOLO_BYTES if on_cpu else 0
