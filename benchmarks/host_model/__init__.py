"""`python -m benchmarks.host_model`: formulas for the data that an all-reduce moves between the ranks of a host."""
