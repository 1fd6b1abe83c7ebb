"""`python -m benchmarks.compress`: the compression kernels compared with a plain copy."""
