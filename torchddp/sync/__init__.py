"""Gradient accumulation over microbatches, when to reduce, and inputs of unequal length. See docs/sync.md."""

from torchddp.ddp.options import DDPSyncStrategy
from torchddp.sync.even import even_batches
from torchddp.sync.microbatches import accumulate, prepare_ddp_module, sync_context

__all__ = ["DDPSyncStrategy", "accumulate", "even_batches", "prepare_ddp_module", "sync_context"]
