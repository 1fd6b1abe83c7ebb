"""Kills and heals replicas under torchft (`--runs`), or compares step time with torchft's class (`--step-time`)."""
