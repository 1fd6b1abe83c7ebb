"""The ways that gradients take on a device: packed into a bucket, or, over NCCL, reduced where autograd made them."""

from benchmarks.gpu.large import large_from

__all__ = ["LARGE_BYTES", "large_from"]

# Gradients of test models are small; from here on they count as large.
LARGE_BYTES = 64
