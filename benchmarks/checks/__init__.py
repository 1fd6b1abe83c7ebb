"""`python -m benchmarks.checks`: the cost of parameter and gradient checks."""
