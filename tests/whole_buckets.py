"""The device code paths of the class, on the CPU: a complete bucket is packed at once."""

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torchddp
from torchddp import _C
from torchddp.ddp import model
from torchddp.ddp.options import DDPOptions
from torchddp.sharded import ShardedDataParallel


@contextlib.contextmanager
def large_from(limit_bytes: int) -> Iterator[None]:
    """Models constructed in the block reduce gradients of at least `limit_bytes` in place, over NCCL; 0: none."""

    def in_place_bytes(options: DDPOptions) -> int:
        return 0 if options.gradient_as_bucket_view else limit_bytes

    with mock.patch.object(DDPOptions, "in_place_bytes", property(in_place_bytes)):
        yield


def packed_whole() -> AbstractContextManager[Any]:
    """Models constructed in the block pack buckets only when they are complete, on the CPU as on a device."""
    return mock.patch.object(_C, "ReducerConfig", functools.partial(_C.ReducerConfig, pack_whole_buckets=True))


class _PacksWhole:
    in_place_bytes = 0

    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
        with packed_whole(), large_from(self.in_place_bytes):
            super()._ddp_init_helper(*args, **kwargs)  # type: ignore[misc]  # of the class it is mixed into


class WholeBuckets(_PacksWhole, torchddp.DistributedDataParallel):
    """The GPU code path without kernels and streams: where and when each gradient is packed."""


@contextlib.contextmanager
def padded_slots() -> Iterator[None]:
    """Models constructed in the block align gradients in buckets as on GPUs."""
    plain = model.param_specs

    def aligned(*args: Any, **kwargs: Any) -> list[_C.ParamSpec]:
        fields = ("name", "numel", "itemsize", "dtype", "device", "sparse", "owner")
        specs = [{field: getattr(spec, field) for field in fields} for spec in plain(*args, **kwargs)]
        return [_C.ParamSpec(**spec, alignment=model.SLOT_ALIGNMENT_BYTES) for spec in specs]

    with mock.patch.object(model, "param_specs", aligned):
        yield


class _PadsSlots(_PacksWhole):
    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
        with padded_slots():
            super()._ddp_init_helper(*args, **kwargs)


class PaddedBuckets(_PadsSlots, torchddp.DistributedDataParallel):
    """As on GPUs, gradients are aligned to cache lines, with zeros between them."""


class LargeInPlace(PaddedBuckets):
    """The GPU code path over NCCL: gradients of 256 bytes or more stay where autograd allocated them."""

    in_place_bytes = 256


class PaddedSharded(_PadsSlots, ShardedDataParallel):
    """PaddedBuckets for sharded gradients."""


class WholeSharded(_PacksWhole, ShardedDataParallel):
    """WholeBuckets for sharded gradients."""
