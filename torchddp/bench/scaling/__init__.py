"""The case `scaling`: training steps over the number of ranks."""
