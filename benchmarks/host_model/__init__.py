"""`python -m benchmarks.host_model`: what an all-reduce moves between the ranks of a host, by formulas."""
