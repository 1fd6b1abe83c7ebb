"""Warnings that one rank gives once, on behalf of all."""

from __future__ import annotations

import logging
import warnings

from torchddp.errors import UsageWarning, warn_user
from torchddp.transport.board import Board

logger = logging.getLogger("torchddp.distributed")


class Teller:
    """Gives a model's warnings; if its ranks can't communicate, each warns for itself."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._board: Board | None = None
        self._told: set[str] = set()

    def follow(self, rank: int, board: Board | None) -> None:
        """Use the rank and board of the model's new process group."""
        self.rank, self._board = rank, board

    def has_told(self, trap: str) -> bool:
        """Whether this rank has nothing more to report."""
        return trap in self._told

    def tell(self, trap: str, text: str, where: tuple[str, int] | None = None) -> None:
        """Warn, unless this or another rank has. ``where``: the file and line to point at; None: the user's current
        line.
        """
        if trap in self._told:
            return
        self._told.add(trap)  # before the warning, which a filter may turn into an error
        if not self._is_first(trap):
            return
        if where is None:
            warn_user(text, UsageWarning)
        else:
            warnings.warn_explicit(text, UsageWarning, *where)

    def _is_first(self, trap: str) -> bool:
        if self._board is None:
            return True
        try:
            return self._board.claim(trap)
        except RuntimeError as error:
            logger.debug("rank %d can't ask whether others have given the warning '%s': %s", self.rank, trap, error)
            return True


def place(where: tuple[str, int]) -> str:
    """'/home/me/train.py:12'."""
    return f"{where[0]}:{where[1]}"
