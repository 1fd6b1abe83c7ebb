"""The exceptions of torchddp, besides the ValueError, TypeError and RuntimeError that torch raises too."""

from torchddp._C import InternalError, TransportError

__all__ = ["InternalError", "TransportError"]
