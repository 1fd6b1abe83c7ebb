"""The case `collective`: single collectives over message sizes, torch's gloo beside the transports of torchddp."""
