"""The engine of DistributedDataParallel without its wrapper, as hooks on the user's own module."""

from torchddp.composable.api import engine_of, replicate, unreplicate
from torchddp.composable.module import ReplicateModule

__all__ = ["ReplicateModule", "engine_of", "replicate", "unreplicate"]
