"""Ends the run on all ranks if one raises: `torchddp.fail_together` around what a launcher starts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from lightning.pytorch.utilities.exceptions import _TunerExitException

from torchddp.diagnose.fail_together import FailTogether, fail_together, finish_first
from torchddp.durations import Duration

if TYPE_CHECKING:
    from lightning.fabric.strategies.launchers.launcher import _Launcher

P = ParamSpec("P")
T = TypeVar("T")


def _background_of(checkpoint_io: object) -> ThreadPoolExecutor | None:
    """What a checkpoint plugin, or one that it wraps, saves with in the background."""
    while checkpoint_io is not None:
        if isinstance(executor := getattr(checkpoint_io, "_executor", None), ThreadPoolExecutor):
            return executor
        checkpoint_io = getattr(checkpoint_io, "checkpoint_io", None)
    return None


class FailsTogether:
    """A strategy mixin: whatever its launcher runs fails on all ranks if it fails on one.

    The context is entered before the process group is created, and watches from then on to the end of teardown.
    """

    _fails_together = True
    _grace_s: Duration | None = 3.0
    _watch: FailTogether | None = None

    def _choose_failing(self, wanted: bool, grace_s: Duration | None) -> None:
        fail_together(grace_s=grace_s)  # checks the number
        self._fails_together, self._grace_s = wanted, grace_s

    @classmethod
    def register_strategies(cls, strategy_registry: object) -> None:
        """No-op: `torchddp.integrations.lightning.register` registers the names."""

    _launcher: Any  # Lightning's, which checks its class

    def _configure_launcher(self) -> None:
        super()._configure_launcher()  # type: ignore[misc]
        self._launcher.launch = partial(self._launch, self._launcher)

    def _launch(self, launcher: _Launcher, function: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T:
        result: T = type(launcher).launch(launcher, partial(self.run_watched, function), *arguments, **more)
        return result

    def setup_environment(self) -> None:
        """Create the process group, and start watching the other ranks."""
        super().setup_environment()  # type: ignore[misc]
        if self._watch is not None:
            self._watch.start()

    def save_checkpoint(self, *arguments: object, **more: object) -> None:
        """As in Lightning; if another rank fails meanwhile, the job ends once the file is written, also by
        `AsyncCheckpointIO` in the background.
        """
        with ExitStack() as saving:
            saving.enter_context(finish_first())
            super().save_checkpoint(*arguments, **more)  # type: ignore[misc]
            if (background := _background_of(self.checkpoint_io)) is not None:  # type: ignore[attr-defined]
                background.submit(saving.pop_all().close)  # after the save, because it has one thread

    def run_watched(self, function: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T:
        """Call the function. Raises `torchddp.PeerFailedError` if another rank raised."""
        if not self._fails_together or self._watch is not None:
            return function(*arguments, **more)
        try:
            with fail_together(grace_s=self._grace_s) as self._watch:
                try:
                    return function(*arguments, **more)
                except _TunerExitException as error:  # a tuner is done, on all ranks
                    stop = error
        finally:
            self._watch = None
        raise stop
