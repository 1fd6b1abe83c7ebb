"""`python -m benchmarks.checks`: what the checks of parameters and gradients cost."""
