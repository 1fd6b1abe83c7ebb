"""Shows where a step's time goes: `profile` in detail, `monitor` all the time."""

from torchddp.profiler.session import Profile, profile
from torchddp.profiler.step_values import Monitor, monitor

__all__ = ["Monitor", "Profile", "monitor", "profile"]
