"""Training on real data by any of our methods, torch's and ours: what `convergence` and `slow_link` have in common."""
