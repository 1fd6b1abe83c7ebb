"""What a rank says of the exception that ended its training loop, and what the others raise."""

from __future__ import annotations

import traceback
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from torchddp.errors import TransportError

__all__ = ["Failure", "PeerFailedError", "is_consequence"]

_MESSAGE_CHARACTERS = 2000
_TRACEBACK_CHARACTERS = 8000
# What torch's backends say when a peer's end of a connection is gone (gloo's errors have no type of their own), and how
# communication hooks report an error of their thread.
_PEER_WORDS = ("gloo", "connection closed", "connection reset", "ncclremoteerror", "broken pipe", "transporterror: ")


class PeerFailedError(TransportError):
    """The training loop of another rank has ended with an exception: see :func:`torchddp.fail_together`.

    Attributes:
        rank: the one that failed first, by its number in the context's process group.
        exception_type: the name of the type of its exception.
        message: what that exception said.
        step: how many steps the model of that rank had begun; None: it had none.
        remote_traceback: where it was raised there, as Python prints it.
    """

    def __init__(
        self,
        rank: int = -1,
        exception_type: str = "",
        message: str = "",
        step: int | None = None,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(rank, exception_type, message, step, remote_traceback)
        self.rank = rank
        self.exception_type = exception_type
        self.message = message
        self.step = step
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return PeerFailedError, self.args  # also of the class that is made to be raised in another thread

    def __str__(self) -> str:
        when = "" if self.step is None else f" at step {self.step}"
        return f"rank {self.rank} failed{when}: {self.exception_type}: {self.message}"


@dataclass(frozen=True)
class Failure:
    """The same, as it is posted; see `PeerFailedError` for the fields."""

    rank: int
    exception_type: str
    message: str
    step: int | None
    remote_traceback: str
    is_consequence: bool  # of another rank's end, as far as this one knows

    @classmethod
    def of(cls, error: BaseException, rank: int, step: int | None) -> Failure:
        """Of an exception that was just caught."""
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(
            rank=rank,
            exception_type=type(error).__name__,
            message=str(error)[:_MESSAGE_CHARACTERS],
            step=step,
            remote_traceback=trace[-_TRACEBACK_CHARACTERS:],
            is_consequence=is_consequence(error),
        )

    def to_json(self) -> dict[str, Any]:
        """For a `Board`."""
        return asdict(self)

    def error(self) -> PeerFailedError:
        """To be raised on another rank."""
        return PeerFailedError(self.rank, self.exception_type, self.message, self.step, self.remote_traceback)


def is_consequence(error: BaseException) -> bool:
    """Whether this is what a rank raises because another one is gone."""
    if isinstance(error, TransportError | dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _PEER_WORDS)
