"""`python -m benchmarks.slow_link`: seconds to a target loss on two hosts with a slow link between them."""
