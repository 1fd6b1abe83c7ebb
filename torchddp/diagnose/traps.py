"""Usage that runs but probably isn't intended; each is reported once, by one rank. See docs/traps.md."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch

from torchddp.ddp.observers import StepObserver
from torchddp.ddp.session import ReducerSession
from torchddp.diagnose.changed_gradients import ChangedGradients
from torchddp.diagnose.cpu_threads import ThreadCheck
from torchddp.diagnose.forward_traps import ForwardTraps
from torchddp.diagnose.needless_search import NeedlessSearch
from torchddp.diagnose.telling import Teller
from torchddp.transport.board import Board

logger = logging.getLogger("torchddp.distributed")


class Check(Protocol):
    """Looks for one kind of mistake, without collectives."""

    def after_forward(self) -> bool:
        """After a forward with gradients; False: no need to call it again."""

    def close(self) -> None: ...


class Traps(StepObserver):
    """The checks of a model over its current process group."""

    def __init__(self, session: ReducerSession) -> None:
        self._session = session
        self._teller = Teller(session.rank)
        self._open()

    def _open(self) -> None:
        session, teller = self._session, self._teller
        board = _board_of(session)
        teller.follow(session.rank, board)
        self._forwards = ForwardTraps(session, teller)
        self._checks: list[Check] = []
        if session.options.find_unused_parameters and not session.options.static_graph:
            self._checks.append(NeedlessSearch(session, teller, board))
        if board is not None and all(spec.owner < 0 for spec in session.specs):
            self._checks.append(ChangedGradients(session, teller, board))
        if session.device.type == "cpu" and not session.is_copy:
            self._checks.append(ThreadCheck(session, teller, board))

    # The compiler must not trace into these when a compiled program calls the model.
    @torch._disable_dynamo(recursive=True)
    def after_forward(self, output: Any) -> None:
        self._forwards.after_forward(output)
        for check in self._checks:
            if not check.after_forward():
                self._checks = [other for other in self._checks if other is not check]

    @torch._disable_dynamo(recursive=True)
    def on_no_sync(self, *, begins: bool) -> None:
        self._forwards.on_no_sync(begins=begins)

    def on_group_change(self) -> None:
        self.close()
        self._open()

    def close(self) -> None:
        self._forwards.close()
        for check in self._checks:
            check.close()
        self._checks = []


def _board_of(session: ReducerSession) -> Board | None:
    """Not collective, but all ranks must call it equally often."""
    if session.is_copy or session.process_group.size() == 1:
        return None
    try:
        return Board(session.process_group, "traps")
    except RuntimeError as error:
        logger.debug("ranks can't agree on who gives warnings: %s", error)
        return None
