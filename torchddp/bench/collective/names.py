"""The names of the implementations, in the order of the table. Pure."""

GLOO = "gloo"
SHM = "shm"
# The transports of ours, as `open_transport` knows them.
OURS = ("c10d", SHM)
IMPLEMENTATIONS = (GLOO, *OURS)
