"""A rank of test_signals.py: the first waits in backward until a signal ends it; the second joins on request."""

import os
import signal
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

import torchddp

WAITING_S = 0.2
LIMIT = timedelta(seconds=600)


def main() -> None:
    """``python -m tests.fault.interrupted_rank RANK TRANSPORT STORE``."""
    rank, transport, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=LIMIT)
    try:
        ddp = torchddp.DistributedDataParallel(torch.nn.Linear(8, 8), transport=transport)
        ddp(torch.ones(2, 8)).sum().backward()
        loss = ddp(torch.ones(2, 8)).sum()
        if rank == 0:
            threading.Timer(WAITING_S, print, ("ready",), {"flush": True}).start()
            loss.backward()
        else:
            print("ready", flush=True)
            sys.stdin.readline()
            try:
                loss.backward()  # matches the other rank's backward, so that it can finish
                ddp(torch.ones(2, 8)).sum().backward()
            except RuntimeError as error:
                print(type(error).__name__, error, flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
