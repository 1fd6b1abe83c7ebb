"""Children forked by a rank exit at once, whatever its threads and locks were doing, and the rank continues."""

import contextlib
import gc
import json
import os
import signal
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import torchddp
from tests.models import Mlp, batch, seeded, step_on
from tests.programs import clean_environment, run_together

RUN_S = 500.0

pytestmark = pytest.mark.beyond_torch("the monitors of waits are ours")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", pytest.param("c10d", marks=pytest.mark.thorough)])
def test_forked_children_exit_and_the_rank_continues(transport, tmp_path):
    command = [sys.executable, "-m", "tests.distributed.test_forked_children", transport, str(tmp_path / "store")]
    for rank in run_together([[*command, str(rank)] for rank in range(2)], [clean_environment()] * 2, RUN_S):
        assert rank.returncode == 0, rank.stderr
        ends = json.loads(rank.stdout)
        assert ends == dict.fromkeys(ends, 0)


# --- a rank, which prints how each of its children ended ---

LIMIT_S = 120
MODELS = 4


def forked(child):
    """Fork a child that calls this; return its exit code, or that of the signal that ends it if it hangs."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT_S)
        child()
        sys.exit()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def locks_of(model):
    calls = model.observers.get("hang_reports").monitor._board.link._calls
    return [calls._lock, torchddp.transport.store._lock, torchddp.transport.worker._watcher._lock]


def with_locks_held(child, models):
    """Fork while another thread of the parent holds all locks."""
    held, ended = threading.Event(), threading.Event()

    def hold():
        with contextlib.ExitStack() as stack:
            for lock in {id(lock): lock for model in models for lock in locks_of(model)}.values():
                stack.enter_context(lock)
            held.set()
            ended.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    exit_code = forked(child)
    ended.set()
    thread.join()
    return exit_code


def by_a_loader():
    data = torch.utils.data.TensorDataset(torch.zeros(8, 2))
    batches = list(torch.utils.data.DataLoader(data, num_workers=2, multiprocessing_context="fork"))
    return 0 if len(batches) == 8 else 1


def main(transport, store_path, rank):
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=RUN_S))
    models = [torchddp.DistributedDataParallel(seeded(Mlp), transport=transport) for _ in range(MODELS)]

    def train():
        for model in models:
            step_on(model, rank)

    def predict():
        with torch.no_grad():
            for model in models:
                model.eval()(batch(0, 0))

    def drop_the_models():
        models.clear()
        gc.collect()

    train()
    told = {}
    for name, run in {
        "predicts": lambda: forked(predict),
        "with locks held": lambda: with_locks_held(lambda: None, models),
        "drops the models": lambda: with_locks_held(drop_the_models, models),
        "a loader": by_a_loader,
    }.items():
        told[name] = run()
    train()
    dist.barrier()
    print(json.dumps(told), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
