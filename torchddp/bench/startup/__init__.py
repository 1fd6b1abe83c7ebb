"""The case `startup`: the constructor and the first two steps."""
