"""The benchmark suite: compares DDP classes by ratios measured within one launch."""
