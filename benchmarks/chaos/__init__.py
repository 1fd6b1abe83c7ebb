"""Random faults in training jobs, and how the other ranks react: the case `chaos`."""
