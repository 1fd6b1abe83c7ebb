"""`python -m benchmarks.two_hosts`: two emulated hosts behind a slow link, on this one machine."""
