"""`python -m benchmarks`: the suites behind our tables, as ratios measured within one launch."""
