"""`python -m benchmarks.two_hosts`: training steps on two emulated hosts with a slow link between them."""
