"""Where torch has it too: ``from torchddp.distributed import DistributedDataParallel``."""

from torchddp.ddp.module import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
