"""Training on real data with torch's methods and ours, for the case `training`."""
