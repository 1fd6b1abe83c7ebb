"""The benchmark suite: DDP classes against each other, as ratios measured within one launch."""
