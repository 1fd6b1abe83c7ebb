"""`python -m benchmarks.chaos`: faults at random places of training jobs, and what the other ranks make of them."""
