"""Shows where a step's time goes: `profile` in detail, `monitor` all the time."""

from torchddp.profiler.session import Monitor, Profile, monitor, profile

__all__ = ["Monitor", "Profile", "monitor", "profile"]
