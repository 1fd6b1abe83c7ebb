"""One rank of a trial over a process group: trains, injects its fault, and reports its observations."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import torchddp
from benchmarks.chaos import plan
from benchmarks.chaos.fault import Injector
from benchmarks.chaos.job import Stamped, make_optimizer, record_step, simulate
from benchmarks.chaos.leaks import footprint, open_sockets
from benchmarks.chaos.outcome import RankReport
from benchmarks.chaos.plan import Trial
from torchddp import Checks
from torchddp.comm_hooks import PerParameter
from torchddp.ddp.options import TransportChoice

_PR_SET_PDEATHSIG = 1
# Timeouts of the process group. Only waiting for a stopped rank reaches them.
STOP_TIMEOUT_S, TIMEOUT_S = 3.0, 10.0
# A report takes up to two seconds if rank 0 is stopped. On a busy machine, ranks wait long even without a hang.
STOP_STALL_REPORT_S, STALL_REPORT_S = 1.0, 2.5


def timeout_of(trial: Trial) -> float:
    """The timeout of the trial's process group, in seconds."""
    return STOP_TIMEOUT_S if trial.kind == plan.STOP else TIMEOUT_S


@dataclass(frozen=True)
class Place:
    """Where a rank finds its store and writes its output."""

    folder: Path
    store_port: int
    lighthouse: str = ""  # the address of torchft's lighthouse, for trials over torchft

    @property
    def hang_reports(self) -> Path:
        """The folder of the ranks' hang reports."""
        return self.folder / "hangs"

    def stderr_path(self, rank: int) -> Path:
        """The file that holds the rank's stderr, stacks included."""
        return self.folder / f"rank{rank}.stderr"


def end_with_parent() -> None:
    """Makes this process die with its parent and leave Ctrl-C to it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def become_rank(rank: int, place: Place) -> None:
    """Sets up a forked process: stderr to a file, one thread, dies with its parent."""
    end_with_parent()
    stderr = os.open(place.stderr_path(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd, target in ((nothing, 0), (nothing, 1), (stderr, 2)):
        os.dup2(fd, target)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.basicConfig(stream=sys.stderr, force=True)  # replaces the parent's handlers
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", "TORCHDDP_HANG_REPORT_DIR": str(place.hang_reports)})
    torch.set_num_threads(1)


def note_error(report: RankReport, error: BaseException) -> None:
    """Records what ended the training, and when."""
    report.error_s = time.monotonic()
    report.error_types = [cls.__name__ for cls in type(error).__mro__]
    report.error = f"{type(error).__name__}: {error}"


def run_rank(rank: int, trial: Trial, place: Place, pipe: Connection) -> None:
    """Entry point of a forked rank. Sends ("fault", (time, footprint)) and ("report", RankReport)."""
    become_rank(rank, place)
    born_with = frozenset(open_sockets().values())
    report = RankReport(rank)

    def announce() -> None:
        pipe.send(("fault", (time.monotonic(), footprint(born_with))))

    injector = Injector(trial, rank, announce, born_with, place.store_port)
    group = None
    try:
        store = dist.TCPStore("127.0.0.1", place.store_port, is_master=False, wait_for_workers=False)
        timeout = datetime.timedelta(seconds=timeout_of(trial))
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"trial{trial.number}", store),
            rank=rank,
            world_size=trial.world_size,
            timeout=timeout,
        )
        group = dist.group.WORLD  # the last reference, so that the group is destroyed without the GIL
        # Other faults must be detected without it.
        with torchddp.fail_together(grace_s=None) if trial.kind == plan.EXCEPTION else contextlib.nullcontext():
            _train(rank, trial, injector, report, born_with)
    except BaseException as error:
        note_error(report, error)
    pipe.send(("report", report))
    gc.collect()
    if report.error and dist.is_initialized():
        # As in a script. Without an error the process exits with its group alive; tests/harness.py explains why.
        dist.destroy_process_group()
    del group
    os._exit(1 if report.error else 0)


def _train(rank: int, trial: Trial, injector: Injector, report: RankReport, born_with: frozenset[str]) -> None:
    has_unused = trial.option in ("find_unused_parameters", "static_graph")
    expected = simulate(range(trial.world_size), plan.STEPS, has_unused)
    injector.visit(plan.CONSTRUCTION)
    model = wrap(trial, Stamped(has_unused, injector.visit))
    injector.model = model
    report.footprint = footprint(born_with)
    optimizer = make_optimizer(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: injector.visit("optimizer"))
    for step in range(plan.STEPS):
        injector.step = step
        optimizer.zero_grad()
        model(rank, step).backward()
        report.transport = model.reducer.transport_name  # shared memory may run out during training
        report.steps.append(record_step(step, model, expected[step]))
        injector.visit("backward_end")
        optimizer.step()
        injector.visit("between")


def wrap(trial: Trial, module: torch.nn.Module) -> Any:
    """The model wrapped in the class under test, with the trial's options."""
    options_of: dict[str, dict[str, Any]] = {
        "none": {},
        "find_unused_parameters": {"find_unused_parameters": True},
        "static_graph": {"static_graph": True},
        "copies": {"gradient_as_bucket_view": False},
        "own_hook": {"comm_hook": PerParameter(None, [])},
        "torch_hook": {"comm_hook": (None, allreduce_hook)},
    }
    options = options_of[trial.option]
    if trial.over == plan.GLOO:
        transport: TransportChoice = "c10d"
    else:
        transport = "auto" if trial.kind == plan.FULL else "shm"
    return torchddp.DistributedDataParallel(
        module,
        transport=transport,
        bucket_cap_mb=trial.bucket_cap_mb,
        checks=Checks(stall_report=STOP_STALL_REPORT_S if trial.kind == plan.STOP else STALL_REPORT_S),
        **options,
    )
