"""Replicas under torchft: killed and healed (`--runs`), and step time against torchft's class (`--step-time`)."""
