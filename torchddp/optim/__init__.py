"""Optimizers for data parallel training: `OSS` shards any optimizer's state."""

from torchddp.optim.checkpoint import load_checkpoint
from torchddp.optim.grad_scaling import ShardedGradScaler
from torchddp.optim.oss import OSS

__all__ = ["OSS", "ShardedGradScaler", "load_checkpoint"]
