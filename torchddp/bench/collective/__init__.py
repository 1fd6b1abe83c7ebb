"""The case `collective`: single collectives over message sizes, of torch, of ours, of other packages, interleaved."""
