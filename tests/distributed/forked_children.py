"""A rank, run as a program, that forks children while it trains; prints how each has ended."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import torchddp
from tests.models import Mlp, batch, seeded, step_on

LIMIT_S = 30.0
MODELS = 4


def exits(models) -> None:
    sys.exit()


def predicts(models) -> None:
    with torch.no_grad():
        for model in models:
            model.eval()(batch(0, 0))
    sys.exit()


def drops_the_models(models) -> None:
    models.clear()
    gc.collect()
    sys.exit()


def timed(run, *args) -> tuple[float, int]:
    begun_s = time.monotonic()
    exit_code = run(*args)
    return time.monotonic() - begun_s, exit_code


def forked(child, models) -> int:
    """How a forked child that calls this ends: its exit code; -9 if it had to be killed."""
    pid = os.fork()
    if pid == 0:
        child(models)
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -9


def locks_of(model) -> list[threading.Lock]:
    calls = model.observers.get("hang_reports").monitor._board._calls
    return [calls._lock, torchddp.transport.interruptible._lock, torchddp.transport.worker._watcher._lock]


def with_locks_held(child, models) -> int:
    """The same, while another thread of the parent holds every lock there is."""
    held, ended = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in {id(lock): lock for model in models for lock in locks_of(model)}.values():
                stack.enter_context(lock)
            held.set()
            ended.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    exit_code = forked(child, models)
    ended.set()
    thread.join()
    return exit_code


def by_multiprocessing(models) -> int:
    process = multiprocessing.get_context("fork").Process(target=exits, args=(models,))
    process.start()
    process.join(LIMIT_S)
    return process.exitcode if process.exitcode is not None else -9


def by_a_loader() -> int:
    data = torch.utils.data.TensorDataset(torch.zeros(8, 2))
    batches = list(torch.utils.data.DataLoader(data, num_workers=2, multiprocessing_context="fork"))
    return 0 if len(batches) == 8 else 1


def main(transport: str, store_path: str, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    models = [torchddp.DistributedDataParallel(seeded(Mlp), transport=transport) for _ in range(MODELS)]

    def train() -> None:
        for model in models:
            step_on(model, rank)

    train()
    told = {
        "predicts": timed(forked, predicts, models),
        "with locks held": timed(with_locks_held, exits, models),
        "drops the models": timed(with_locks_held, drops_the_models, models),
        "multiprocessing": timed(by_multiprocessing, models),
        "a loader": timed(by_a_loader),
    }
    train()
    dist.barrier()
    print(json.dumps(told), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
