"""Replicas under torchft: killed and healed (`--runs`), and the cost of a step beside torchft's (`--step-time`)."""
