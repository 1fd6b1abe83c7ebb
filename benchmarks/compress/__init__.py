"""`python -m benchmarks.compress`: the compression kernels against a plain copy."""
