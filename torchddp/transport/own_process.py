"""What belongs to one process: the child of a fork has none of its threads, and its locks as they happened to be."""

from __future__ import annotations

import os

__all__ = ["OwnProcess"]


class OwnProcess:
    """The process that it was made in. Whatever has a thread or a lock holds one, and does nothing in another process.

    To be asked before a lock is taken: the thread that holds it in a child may be one that exists in the parent only.
    """

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """False in the child of a fork."""
        return os.getpid() == self._pid
