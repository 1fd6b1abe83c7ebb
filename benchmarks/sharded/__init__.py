"""`python -m benchmarks.sharded`: the cost and savings of sharding optimizer state and gradients, by package."""
