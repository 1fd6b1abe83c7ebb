"""`python -m benchmarks.convergence`: what compressed and rare communication costs in loss, on real data."""
