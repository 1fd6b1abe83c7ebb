"""The class as it works on devices, on the CPU: a bucket is packed when it is complete, in one go."""

import functools
from typing import Any
from unittest import mock

import torchddp
from torchddp import _C
from torchddp.sharded import ShardedDataParallel


class _PacksWhole:
    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
        whole = functools.partial(_C.Reducer, pack_whole_buckets=True)
        with mock.patch.object(_C, "Reducer", whole):
            super()._ddp_init_helper(*args, **kwargs)  # type: ignore[misc]  # of the class it is mixed into


class WholeBuckets(_PacksWhole, torchddp.DistributedDataParallel):
    """What GPUs get, but for the kernels and the streams: which gradient goes where, and when."""


class WholeSharded(_PacksWhole, ShardedDataParallel):
    """The same for sharded gradients."""
