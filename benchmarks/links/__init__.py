"""`python -m benchmarks.links`: planned buckets and the simulator, over links of several rates and on one host."""
