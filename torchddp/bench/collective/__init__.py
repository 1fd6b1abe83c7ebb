"""The case `collective`: single collectives by message size, of torch, torchddp and other packages, interleaved."""
