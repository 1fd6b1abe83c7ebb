"""The exceptions of torchddp, besides the ValueError, TypeError and RuntimeError that torch raises too."""

from torchddp._C import InternalError, TransportError

__all__ = ["DesyncError", "InternalError", "TransportError"]


class DesyncError(RuntimeError):
    """Parameters that should be the same on all ranks are not. Raised on all of them.

    Attributes:
        step: finished synchronised steps.
        parameter: name of the first that differs, in the order of registration; None if their numbers differ.
        ranks: those that have another value than most, or than rank 0 if no value is that of most.
        num_parameters: how many parameters differ.
        max_difference: of the first one's elements, the largest that is finite; None if it was not found out.
    """

    def __init__(
        self,
        message: str,
        step: int,
        parameter: str | None,
        ranks: tuple[int, ...],
        num_parameters: int,
        max_difference: float | None,
    ) -> None:
        super().__init__(message)
        self.step = step
        self.parameter = parameter
        self.ranks = ranks
        self.num_parameters = num_parameters
        self.max_difference = max_difference

    def __reduce__(self) -> tuple[object, ...]:
        details = (self.step, self.parameter, self.ranks, self.num_parameters, self.max_difference)
        return type(self), (self.args[0], *details)
