"""Gradient accumulation over microbatches, when its gradients are reduced, and even inputs. See docs/sync.md."""

from torchddp.ddp.sync_strategy import DDPSyncStrategy
from torchddp.sync.accumulation import accumulate
from torchddp.sync.context import sync_context
from torchddp.sync.even import even_batches
from torchddp.sync.preparation import prepare_ddp_module

__all__ = ["DDPSyncStrategy", "accumulate", "even_batches", "prepare_ddp_module", "sync_context"]
