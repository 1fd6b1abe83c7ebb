"""An exception on one rank ends the run on all: `torchddp.fail_together` around what a launcher starts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher as FabricMultiProcessing
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher as FabricSubprocess
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as TrainerMultiProcessing
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as TrainerSubprocess
from lightning.pytorch.utilities.exceptions import _TunerExitException

from torchddp.diagnose.fail_together import FailTogether, fail_together


class FailsTogether:
    """Part of a strategy: whatever its launcher runs fails on all ranks if it fails on one.

    The context is entered before the process group is made, and watches from then on: so it spans what Lightning does
    from setup to teardown, in the process of each rank, however that was started.
    """

    _scripts: type[Any]  # the launchers: of further commands, of forked or spawned ranks
    _processes: type[Any]
    _fails_together = True
    _grace_s: float | None = 3.0
    _watch: FailTogether | None = None

    def _choose_failing(self, wanted: bool, grace_s: float | None) -> None:
        fail_together(grace_s=grace_s)  # checks the number
        self._fails_together, self._grace_s = wanted, grace_s

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: the names are those of `torchddp.integrations.lightning.register`."""

    def _configure_launcher(self) -> None:
        strategy: Any = self
        assert strategy.cluster_environment is not None
        if strategy._start_method == "popen":
            launcher = self._scripts(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        else:
            launcher = self._processes(strategy, start_method=strategy._start_method)
        launcher.watched_by = self
        strategy._launcher = launcher

    def setup_environment(self) -> None:
        """Makes the process group, and begins to look at what the other ranks say there."""
        super().setup_environment()  # type: ignore[misc]
        if self._watch is not None:
            self._watch.start()

    def run_watched(self, function: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """Calls the function. Raises `torchddp.PeerFailedError` where another rank's has raised."""
        if not self._fails_together or self._watch is not None:
            return function(*arguments, **more)
        stop: _TunerExitException | None = None
        result = None
        try:
            watch = fail_together(grace_s=self._grace_s)
            with watch:
                self._watch = watch
                try:
                    result = function(*arguments, **more)
                except _TunerExitException as error:  # how a tuner says that it is done, on all ranks
                    stop = error
        finally:
            self._watch = None
        if stop is not None:
            raise stop
        return result


class _Watched:
    """Part of a launcher."""

    watched_by: FailsTogether

    def launch(self, function: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """As the launcher it is mixed into."""
        return super().launch(partial(self.watched_by.run_watched, function), *arguments, **more)  # type: ignore[misc]


class TrainerScripts(_Watched, TrainerSubprocess):
    """One process for each further rank, by the command line of this one."""


class TrainerProcesses(_Watched, TrainerMultiProcessing):
    """All ranks forked or spawned from this process."""


class FabricScripts(_Watched, FabricSubprocess):
    """As `TrainerScripts`, for Fabric."""


class FabricProcesses(_Watched, FabricMultiProcessing):
    """As `TrainerProcesses`, for Fabric."""
