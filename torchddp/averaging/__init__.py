"""Training with few synchronizations: averaging models instead of gradients. See docs/averaging.md."""

from torchddp.averaging.averagers import HierarchicalAverager, PeriodicAverager
from torchddp.averaging.diloco import DiLoCo
from torchddp.averaging.optimizers import PostLocalSGD

__all__ = ["DiLoCo", "HierarchicalAverager", "PeriodicAverager", "PostLocalSGD"]
