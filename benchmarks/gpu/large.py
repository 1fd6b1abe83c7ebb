"""Context managers that change which gradients are reduced in place, for models constructed within."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torchddp import _C
from torchddp.ddp.options import DDPOptions


@contextlib.contextmanager
def large_from(limit_bytes: int) -> Iterator[None]:
    """Gradients of at least `limit_bytes` are reduced where autograd made them, over NCCL; 0: none are."""

    def adopt_bytes(options: DDPOptions) -> int:
        return limit_bytes if options.adopt_large_gradients and not options.gradient_as_bucket_view else 0

    with mock.patch.object(DDPOptions, "adopt_bytes", property(adopt_bytes)):
        yield


def packed_whole() -> AbstractContextManager[Any]:
    """Packs buckets only when they are complete, on the CPU as on a device; otherwise no gradient could be adopted."""
    return mock.patch.object(_C, "Reducer", functools.partial(_C.Reducer, pack_whole_buckets=True))
