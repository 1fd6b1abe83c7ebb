"""The case `step_time`: whole training steps."""
