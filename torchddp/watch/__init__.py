"""Ranks that tell each other how they are, beside the collectives they may be stuck in."""
