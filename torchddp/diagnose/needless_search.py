"""Detects find_unused_parameters=True on a model that uses all parameters."""

from __future__ import annotations

import logging

from torchddp.ddp.session import ReducerSession
from torchddp.diagnose.telling import Teller
from torchddp.transport.board import Board

logger = logging.getLogger("torchddp.distributed")

LOOKED_AT = 10  # steps
NEEDLESS = "needless find_unused_parameters"


class NeedlessSearch:
    """Rank 0 reports it if no rank leaves out a parameter in the first `LOOKED_AT` steps."""

    def __init__(self, session: ReducerSession, teller: Teller, board: Board | None) -> None:
        self._session, self._teller, self._board = session, teller, board
        self._begin = session.reducer.finished_steps
        self._has_posted = False

    def after_forward(self) -> bool:
        session = self._session
        steps = session.reducer.finished_steps - self._begin
        if session.joins:
            return False
        if steps < LOOKED_AT or not session.synchronizes:
            return True
        try:
            return self._post() if not self._has_posted else self._judge(steps)
        except RuntimeError as error:
            logger.debug("rank %d can't ask whether others leave out parameters: %s", session.rank, error)
            return False

    def close(self) -> None:
        pass

    def _post(self) -> bool:
        reducer = self._session.reducer
        if not reducer.graph_has_been_static() or reducer.unused_bytes() != 0:
            return False
        if self._board is None:
            self._tell()
            return False
        self._board.add(NEEDLESS, 1)
        self._has_posted = True
        return self._session.rank == 0

    def _judge(self, steps: int) -> bool:
        """Called one step later, when all ranks have begun it and have posted what they found."""
        if steps == LOOKED_AT or self._board is None:
            return True
        if self._board.add(NEEDLESS, 0) == self._board.size:
            self._tell()
        return False

    def _tell(self) -> None:
        self._teller.tell(
            NEEDLESS,
            f"find_unused_parameters=True is not needed so far: every parameter was used on every rank in each of the "
            f"first {LOOKED_AT} synchronized steps. Leave out find_unused_parameters=True: it walks through the graph "
            "after every forward, and sends one more message a step. Keep it only if later steps leave parameters out.",
        )
