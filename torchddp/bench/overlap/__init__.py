"""The case `overlap`: how much of the communication hides behind the computation."""
