"""Optimizers for data parallel training: `OSS` shards any optimizer's state."""

from torchddp.sharded.checkpoint import load_checkpoint
from torchddp.sharded.gradients import ShardedGradScaler
from torchddp.sharded.oss import OSS
from torchddp.sharded.partition import Share

__all__ = ["OSS", "Share", "ShardedGradScaler", "load_checkpoint"]
