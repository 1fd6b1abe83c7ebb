"""Where the time of a step goes: `profile` in detail, `monitor` all the time."""

from torchddp.profiler.monitor import Monitor, monitor
from torchddp.profiler.session import Profile, profile

__all__ = ["Monitor", "Profile", "monitor", "profile"]
