"""Training on real data with torch's methods and ours; shared by `convergence` and `slow_link`."""
