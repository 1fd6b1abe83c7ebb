"""The class as it works on devices, on the CPU: a bucket is packed when it is complete, in one go."""

import functools
from typing import Any
from unittest import mock

import torchddp
from torchddp import _C


class WholeBuckets(torchddp.DistributedDataParallel):
    """What GPUs get, but for the kernels and the streams: which gradient goes where, and when."""

    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
        whole = functools.partial(_C.Reducer, pack_whole_buckets=True)
        with mock.patch.object(_C, "Reducer", whole):
            super()._ddp_init_helper(*args, **kwargs)
