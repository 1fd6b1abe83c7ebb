"""Optimizers for data parallel training: `OSS` shards any optimizer's state, `DeferredOptimizer` updates later."""

from torchddp.optim.checkpoint import load_checkpoint
from torchddp.optim.deferred import DeferredOptimizer
from torchddp.optim.grad_scaling import ShardedGradScaler
from torchddp.optim.oss import OSS

__all__ = ["OSS", "DeferredOptimizer", "ShardedGradScaler", "load_checkpoint"]
