"""Diagnosis of what goes wrong: hangs, lost peers, diverged parameters, non-finite gradients, misuse."""
