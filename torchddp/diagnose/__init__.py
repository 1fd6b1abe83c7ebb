"""What should hold by itself, and what is wrong where it does not: hangs, lost peers, parameters, gradients."""
