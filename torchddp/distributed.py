"""A second place to import from, as in torch: ``from torchddp.distributed import DistributedDataParallel``."""

from torchddp.ddp.module import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
