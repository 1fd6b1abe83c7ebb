"""Ranks that hang in the program's own collectives: one report names each rank with its function and line."""

import re
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import torchddp
from tests.fault.test_hang_reports import STALL_S, TIMEOUT_S, Reports, is_reported, step_on
from tests.harness import run_outcomes
from tests.models import Mlp, seeded
from tests.unit.helpers import wait_until
from torchddp import Checks

pytestmark = pytest.mark.beyond_torch("torch waits in silence")


def headlines(work, world_size=2):
    """The headlines of the reports that `work(rank)` returns, and the reports."""
    texts = [text for outcome in run_outcomes(work, world_size) for text in outcome.value or []]
    return [text.partition("\n")[0] for text in texts], texts


def watching(folder, timeout_s=TIMEOUT_S):
    """This rank's reports, a model that makes them, and a new group with a short timeout."""
    reports = Reports(folder)
    model = torchddp.DistributedDataParallel(seeded(Mlp), checks=Checks(stall_report=STALL_S))
    return reports, model, dist.new_group(timeout=timedelta(seconds=timeout_s))


def stay_until_reported(folder):
    """The others raise when this rank's program has ended, or at their timeout."""
    wait_until(lambda: is_reported(folder), TIMEOUT_S)
    time.sleep(STALL_S)


def run_in_thread(loop):
    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()


def test_a_reduction_and_a_barrier(tmp_path):
    """With a wrapped model there is one report, of the step, with the call of the rank that blocks it."""

    def work(rank):
        reports, _, group = watching(tmp_path, timeout_s=TIMEOUT_S + 0.5)
        ddp = torchddp.DistributedDataParallel(
            seeded(Mlp), timeout=timedelta(seconds=TIMEOUT_S), checks=Checks(stall_report=STALL_S)
        )
        for step in range(3):
            step_on(ddp, rank, step)
        with pytest.raises(RuntimeError):
            if rank == 1:
                dist.barrier(group)
            else:
                step_on(ddp, rank, 3)
                step_on(ddp, rank, 4)
        time.sleep(1.0)
        return reports.texts

    (headline, *more), texts = headlines(work, 3)
    assert all(float(re.findall(r"waited ([\d.]+)", text)[0]) >= 4 * STALL_S for text in more), texts
    assert "rank 1 has finished step 3 (ranks 0 and 2 are at 4): " in headline
    assert "it is in barrier at test_hanging_calls.py:" in headline and '(group "1" of ranks 0-2)' in headline


def test_a_loop_in_a_thread_and_its_exception(tmp_path):
    """As in Ray Train. The report shows the thread's exception and position, not the main thread waiting for it."""

    def work(rank):
        texts = []

        def train_loop_per_worker():
            reports, _model, group = watching(tmp_path)
            texts.append(reports.texts)
            dist.barrier(group)
            try:
                if rank == 1:
                    raise ValueError("no more data")
                dist.all_reduce(torch.ones(2), group=group)
            except ValueError:
                while not is_reported(tmp_path):
                    time.sleep(0.02)
                time.sleep(STALL_S)
            except RuntimeError:
                pass

        run_in_thread(train_loop_per_worker)
        return texts[0]

    (headline, *_), texts = headlines(work)
    assert "rank 0 waits in all_reduce at test_hanging_calls.py:" in headline
    assert "rank 1 is at test_hanging_calls.py:" in headline and " in train_loop_per_worker" in headline, texts
    assert "it is handling ValueError: no more data" in headline


def test_a_loop_whose_thread_has_ended(tmp_path):
    """An uncaught exception ended the thread, while the process continues."""

    def work(rank):
        held = []

        def loop():
            held.extend(watching(tmp_path))
            group = held[2]
            dist.barrier(group)
            if rank == 1:
                raise KeyError("label")
            with pytest.raises(RuntimeError):
                dist.barrier(group)

        run_in_thread(loop)
        if rank == 1:
            stay_until_reported(tmp_path)
        return held[0].texts

    (headline, *_), _ = headlines(work)
    assert "rank 1 is elsewhere: its training thread has ended; it left its thread with KeyError: 'label'" in headline


def test_a_rank_whose_program_has_ended(tmp_path):
    """The report names its exception; torch only says 'connection closed', or nothing over shared memory."""

    def work(rank):
        reports, model, _ = watching(tmp_path)
        dist.barrier()
        if rank == 1:  # what the interpreter does at exit
            sys.excepthook(ValueError, ValueError("wrong label"), None)
            model.observers.get("hang_reports").monitor._at_exit()
            stay_until_reported(tmp_path)
            return []
        with pytest.raises(RuntimeError):
            dist.monitored_barrier(timeout=timedelta(seconds=0.8 * TIMEOUT_S))
        return reports.texts

    (headline, *_), _ = headlines(work)
    assert "rank 1 has left the training (process " in headline
    assert "its program has ended after ValueError: wrong label" in headline
