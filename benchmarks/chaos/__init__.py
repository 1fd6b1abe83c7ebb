"""`python -m benchmarks.chaos`: random faults in training jobs, to check how the other ranks react."""
