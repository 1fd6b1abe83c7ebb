"""One replica of a trial under a torchft Manager: keeps training when others die, and reports its observations."""

from __future__ import annotations

import copy
import datetime
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.chaos import plan
from benchmarks.chaos.fault import Injector
from benchmarks.chaos.job import Stamped, deviation, digest, gradients, make_optimizer, mean_gradients
from benchmarks.chaos.leaks import footprint, open_sockets
from benchmarks.chaos.outcome import RankReport, StepRecord
from benchmarks.chaos.plan import Trial
from benchmarks.chaos.worker import Place, become_rank, note_error

_TIMEOUT = datetime.timedelta(seconds=10)
# Timeout of a reduction: a replica may wait this long for another that is waiting for the lost one.
_STEP_TIMEOUT = datetime.timedelta(seconds=5)
_LINGER_S = 3.0


def run_replica(rank: int, trial: Trial, place: Place, pipe: Connection) -> None:
    """Entry point of a forked replica. Sends ("fault", (time, footprint)) and ("report", RankReport)."""
    become_rank(rank, place)
    born_with = frozenset(open_sockets().values())
    report = RankReport(rank, transport="torchft")

    def announce() -> None:
        pipe.send(("fault", (time.monotonic(), footprint(born_with))))

    injector = Injector(trial, rank, announce, born_with, place.store_port)
    try:
        _train(trial, place, injector, report, born_with)
    except BaseException as error:
        note_error(report, error)
    pipe.send(("report", report))
    os._exit(1 if report.error else 0)  # torchft's manager threads would delay a normal exit by seconds


def _meet(store: Any, name: str, count: int, limit_s: float) -> None:
    """Waits until `count` replicas have arrived, for at most `limit_s`."""
    store.add(name, 1)
    deadline_s = time.monotonic() + limit_s
    while store.add(name, 0) < count and time.monotonic() < deadline_s:
        time.sleep(0.01)


def _train(trial: Trial, place: Place, injector: Injector, report: RankReport, born_with: frozenset[str]) -> None:
    from torchft import Manager, Optimizer, ProcessGroupGloo

    from torchddp import fault_tolerance

    own_store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    starters_store = dist.TCPStore("127.0.0.1", place.store_port, is_master=False, wait_for_workers=False)
    shared = dist.PrefixStore(f"trial{trial.number}", starters_store)
    network = Stamped(False, injector.visit)
    optimizer = make_optimizer(network.parameters())
    weights: dict[str, Any] = {}

    def before_step(*_: Any) -> None:
        weights.update(copy.deepcopy(network.state_dict()))  # a healing replica has just received them
        injector.visit("optimizer")

    optimizer.register_step_pre_hook(before_step)
    roster = _Roster(shared, report.rank, trial.world_size)
    manager: Any = Manager(
        pg=ProcessGroupGloo(timeout=_STEP_TIMEOUT),
        load_state_dict=network.load_state_dict,
        state_dict=network.state_dict,
        min_replica_size=1,
        timeout=_STEP_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        connect_timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=own_store.port,
        lighthouse_addr=place.lighthouse,
        replica_id=f"trial{trial.number}_{report.rank}_",
        init_sync=False,  # all begin with the same weights
    )
    model = fault_tolerance.DistributedDataParallel(manager, network, bucket_cap_mb=trial.bucket_cap_mb)
    whole = Optimizer(manager, optimizer)
    _meet(shared, "made", trial.world_size, _TIMEOUT.total_seconds())  # until the lighthouse knows all replicas
    report.footprint = footprint(born_with)
    while manager.current_step() < plan.STEPS:
        injector.step = manager.current_step()
        whole.zero_grad()  # starts the quorum
        step = roster.sign(manager)
        model(report.rank, step).backward()
        grads = [None if grad is None else grad.clone() for grad in gradients(network)]
        injector.visit("backward_end")
        whole.step()  # only if all went well
        if manager.current_step() > step:
            if trial.rank not in roster.ranks and report.recovered_s is None:
                report.recovered_s = time.monotonic()
            report.steps.append(_record(step, weights, grads, roster.ranks))
        injector.visit("between")
    _meet(shared, "done", trial.world_size - (trial.kind != plan.SLOW), _LINGER_S)  # for the others' last step


class _Roster:
    """Records which replicas participate in a step; a manager only knows how many."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._page = ""

    def sign(self, manager: Any) -> int:
        """Waits for the quorum, records whether this replica participates, returns the step. Call before backward."""
        manager.wait_quorum()
        step = manager.current_step()  # a healing replica has just learned it
        self._page = f"{step}/{manager.num_participants()}"
        if manager.is_participating():
            self._store.add(f"{self._page}/{self._rank}", 1)
        return step

    @property
    def ranks(self) -> list[int]:
        """The step's participants; complete once the step is committed."""
        return [rank for rank in range(self._world_size) if self._store.check([f"{self._page}/{rank}"])]


def _record(step: int, weights: dict[str, Any], grads: list[torch.Tensor | None], ranks: list[int]) -> StepRecord:
    """Records a committed step: its gradients must be the mean over its participants."""
    model = Stamped(False)
    model.load_state_dict(weights)
    expected = mean_gradients(model, ranks, step)
    return StepRecord(step, digest(grads), digest(expected), deviation(grads, expected))
