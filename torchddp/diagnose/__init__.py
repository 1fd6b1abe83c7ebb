"""Diagnoses hangs, lost peers, diverged parameters, non-finite gradients and misuse."""
