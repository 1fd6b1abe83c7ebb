"""Shows where a step's time goes: `profile` in detail, `monitor` all the time."""

from torchddp.profiler.monitor import Monitor, monitor
from torchddp.profiler.session import Profile, profile

__all__ = ["Monitor", "Profile", "monitor", "profile"]
