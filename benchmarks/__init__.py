"""`python -m benchmarks` is `torchddp bench` in a checkout; each subpackage is a benchmark of its own."""
