"""One call that picks the parallelism of a model. See docs/parallelize.md."""

from torchddp.parallel.apply import parallelize
from torchddp.parallel.config import ParallelConfig
from torchddp.parallel.groups import GroupInfo, ParallelGroupInfo, device_mesh, parallel_group_info

__all__ = ["GroupInfo", "ParallelConfig", "ParallelGroupInfo", "device_mesh", "parallel_group_info", "parallelize"]
