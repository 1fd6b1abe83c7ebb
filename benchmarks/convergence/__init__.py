"""`python -m benchmarks.convergence`: the loss that compressed and infrequent communication costs, on real data."""
