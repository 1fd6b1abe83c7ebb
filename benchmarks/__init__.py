"""`python -m benchmarks`: `torchddp bench` in a checkout; two_hosts and gpu are suites for other machines."""
