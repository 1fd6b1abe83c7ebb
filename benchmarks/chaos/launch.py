"""Starts the ranks of trials, follows them, ends them, and checks for leaks.

Ranks are forks of multiprocessing's fork server, which has imported all that they need, so a trial takes about as long
as its fault.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from benchmarks.chaos import plan
from benchmarks.chaos.leaks import Inventory, adopt_orphans
from benchmarks.chaos.lighthouse import lighthouse
from benchmarks.chaos.outcome import Footprint, HangReport, Outcome, RankOutcome
from benchmarks.chaos.plan import Trial
from benchmarks.chaos.replica import run_replica
from benchmarks.chaos.worker import Place, run_rank
from torchddp.harness.launch import started

# A rank that is silent for this long hangs: far beyond every timeout and bound.
HANG_S = 25.0
EXIT_S = 8.0  # after its report, or after all others have ended
_STACKS_S = 0.3
# torch._dynamo, because the constructor of torch's DDP imports it.
_IMPORTED = [__name__, "torch._dynamo", "torchft"]

Entry = Callable[[int, Trial, Place, Connection], None]


class Rank:
    """One rank's process and the messages that it has sent."""

    def __init__(self, rank: int, process: BaseProcess, pipe: Connection, place: Place) -> None:
        self.process, self.pipe = process, pipe
        self.outcome = RankOutcome(rank)
        self.footprints: list[Footprint] = []
        self.fault_s: float | None = None
        self.ended = self.is_silent = False
        self._stderr_path = place.stderr_path(rank)

    def read(self) -> None:
        """Reads pending messages and checks whether the process has ended: its children may hold the pipe open."""
        self.ended = self.process.exitcode is not None
        try:
            while not self.is_silent and self.pipe.poll():
                kind, value = self.pipe.recv()
                if kind == "fault":
                    self.fault_s, seen = value
                else:
                    self.outcome.report, seen = value, value.footprint
                self.footprints.append(seen)
        except (EOFError, ConnectionResetError):
            self.is_silent = True

    def waking(self) -> list[Connection | int]:
        """The handles to wait on."""
        return [self.process.sentinel] if self.is_silent else [self.pipe, self.process.sentinel]

    def hangs(self) -> None:
        """Records that the rank hangs and dumps its stacks; it is killed later."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
        time.sleep(_STACKS_S)
        self.outcome.hung = "did not exit after its report" if self.outcome.report else "neither result nor error"

    def close(self) -> None:
        """Collects exit code and stderr once the process has ended."""
        self.outcome.exit_code = self.process.exitcode
        self.outcome.stderr = self._stderr_path.read_text() if self._stderr_path.exists() else ""
        self.pipe.close()


def _follow(ranks: list[Rank], trial: Trial) -> None:
    """Waits until all ranks have ended or timed out. Does not wait for a stopped rank."""
    awaited = [rank for rank in ranks if (trial.kind, trial.rank) != (plan.STOP, rank.outcome.rank)]
    deadline_s = time.monotonic() + HANG_S
    while not all(rank.ended for rank in awaited):
        if all(rank.ended or rank.outcome.report for rank in awaited):
            deadline_s = min(deadline_s, time.monotonic() + EXIT_S)
        waking = [thing for rank in ranks if not rank.ended for thing in rank.waking()]
        if not wait(waking, max(0.0, deadline_s - time.monotonic())):
            break
        for rank in ranks:
            rank.read()
    for rank in awaited:
        if not rank.ended:
            rank.hangs()


def _read_reports(folder: Path) -> list[HangReport]:
    found = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(ValueError):  # its rank ended while writing it
            report = json.loads(path.read_text())
            found.append(HangReport(report["headline"], [culprit["rank"] for culprit in report["culprits"]]))
    return found


def run_trials(trials: Sequence[Trial]) -> Iterator[Outcome]:
    """Runs one trial after the other, and cleans up after each."""
    adopt_orphans()
    forkserver.set_forkserver_preload(_IMPORTED)
    # Otherwise the first trial would start them, and seem to leave them behind.
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    # As with torchrun, the store outlives the ranks.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for trial in trials:
        if trial.over == plan.TORCHFT:
            # A new one each time, because a lighthouse counts the last trial's dead replicas as members for a while.
            with lighthouse() as address:
                yield _run_trial(trial, store.port, run_replica, address)
        else:
            yield _run_trial(trial, store.port, run_rank)


def _run_trial(trial: Trial, store_port: int, entry: Entry, lighthouse: str = "") -> Outcome:
    started_s = time.monotonic()
    inventory = Inventory()
    with tempfile.TemporaryDirectory(prefix="torchddp-chaos-") as folder:
        place = Place(Path(folder), store_port, lighthouse)
        with started(trial.world_size, entry, (trial, place), method="forkserver") as processes:
            ranks = [Rank(number, *found, place) for number, found in enumerate(processes)]
            _follow(ranks, trial)
        for rank in ranks:
            rank.read()  # messages of a killed rank
            rank.close()
        hang_reports = _read_reports(place.hang_reports)
    leaks = inventory.leaks([seen for rank in ranks for seen in rank.footprints])
    fault_s = next((rank.fault_s for rank in ranks if rank.fault_s is not None), None)
    return Outcome(
        trial,
        [rank.outcome for rank in ranks],
        fault_s,
        leaks,
        hang_reports,
        time.monotonic() - started_s,
    )
