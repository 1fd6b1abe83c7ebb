"""`python -m benchmarks.sharded`: what sharding optimizer state and gradients costs and saves, against the peers."""
