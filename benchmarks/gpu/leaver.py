"""A program that trains a wrapped model, loads data in forked processes while the model is alive, and ends.

`python -m benchmarks.gpu.leaver CLASS DEVICE BACKEND` prints one line of JSON: the ms that loading and leaving the
group took, and the time at which only ending the process was left.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from torchddp.harness.networks import SMALL_NUMEL, ManySmallTensors
from torchddp.harness.variants import load_class

STEPS, WORKERS, BATCHES, LOADING_LIMIT_S = 3, 2, 8, 30


def _ms(work: Callable[[], object]) -> float:
    start_ns = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start_ns) / 1e6


def main(class_path: str, device_name: str, backend: str) -> None:
    device = torch.device(device_name)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        model = load_class(class_path)(ManySmallTensors().to(device))
        batch = torch.randn(SMALL_NUMEL, device=device)
        for _ in range(STEPS):
            model.zero_grad(set_to_none=True)
            model(batch).backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        data = TensorDataset(torch.randn(16 * BATCHES, 8))
        loader = DataLoader(
            data, batch_size=16, num_workers=WORKERS, multiprocessing_context="fork", timeout=LOADING_LIMIT_S
        )
        loading_ms = _ms(lambda: list(loader))
        leaving_ms = _ms(dist.destroy_process_group)
    print(json.dumps({"loading_ms": loading_ms, "leaving_ms": leaving_ms, "ended_s": time.monotonic()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
