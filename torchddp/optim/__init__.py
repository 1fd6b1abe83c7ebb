"""Optimizers for data parallel training: `OSS` shards any optimizer's state over the ranks."""

from torchddp.optim.checkpoint import load_checkpoint
from torchddp.optim.oss import OSS

__all__ = ["OSS", "load_checkpoint"]
