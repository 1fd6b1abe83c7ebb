"""Data parallel training with sharded gradients and optimizer state, on top of `torchddp.optim.OSS`."""

from torchddp.sharded.data_parallel import ShardedDataParallel

__all__ = ["ShardedDataParallel"]
