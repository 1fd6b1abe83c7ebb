"""`python -m benchmarks.slow_link`: seconds to one loss on two hosts with a slow link between them."""
