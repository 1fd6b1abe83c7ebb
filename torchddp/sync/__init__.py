"""Gradient accumulation over microbatches, and when its gradients are reduced. See docs/sync.md."""

from torchddp.sync.accumulation import accumulate
from torchddp.sync.context import sync_context
from torchddp.sync.preparation import prepare_ddp_module
from torchddp.sync_strategy import DDPSyncStrategy

__all__ = ["DDPSyncStrategy", "accumulate", "prepare_ddp_module", "sync_context"]
