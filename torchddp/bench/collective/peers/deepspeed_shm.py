"""DeepSpeed's all-reduce in shared memory. Its operator is compiled on first use, before any rank starts."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchddp.bench.collective.companion import Run
from torchddp.bench.collective.peers.install import EXTRA, forget_shared_memory, unique_name
from torchddp.plan.plan_cache import cache_folder

OPERATOR = "deepspeed_shm_comm"
COMPILE = "from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder as Builder; Builder().load(verbose=False)"


def build_folder() -> Path | None:
    """The folder of the operator compiled for the installed versions; None without DeepSpeed."""
    try:
        deepspeed = version("deepspeed")
    except PackageNotFoundError:
        return None
    return cache_folder() / "bench" / f"deepspeed-{deepspeed}-torch-{torch.__version__}-{platform.python_version()}"


def operator_path(folder: Path) -> Path:
    return folder / OPERATOR / f"{OPERATOR}.so"


def compile_once(before: Callable[[], None]) -> None:
    """Compile the operator, after calling `before`, unless it exists. If that fails, ranks report it on loading."""
    folder = build_folder()
    if folder is None or operator_path(folder).exists():
        return
    before()
    folder.mkdir(parents=True, exist_ok=True)
    # ninja may be installed in the Python environment only.
    path = f"{sys.prefix}/bin{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, "TORCH_EXTENSIONS_DIR": str(folder), "DS_ACCELERATOR": "cpu"}
    with open(folder / "log.txt", "wb") as log:
        subprocess.run([sys.executable, "-c", COMPILE], env=environment, stdout=log, stderr=log, check=False)


def _load() -> Any:
    folder = build_folder()
    if folder is None:
        raise RuntimeError(EXTRA)
    path = operator_path(folder)
    if not path.exists():
        raise RuntimeError(f"its operator failed to compile, see {folder / 'log.txt'}")
    spec = importlib.util.spec_from_file_location(OPERATOR, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not module.vector_kernel_level():
        raise RuntimeError("it needs AVX2")
    return module


class DeepspeedShm:
    """`torch.ops.deepspeed.inference_all_reduce_`; collective."""

    def __init__(self, name: str) -> None:
        self.name = name
        operator = _load()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        # DeepSpeed's launcher sets these, and the shared memory is named after them.
        address, port = unique_name(), "0"
        settings = {"LOCAL_SIZE": str(world_size), "MASTER_ADDR": address, "MASTER_PORT": port}
        before = {key: os.environ.pop(key, None) for key in settings}
        os.environ.update(settings)
        operator.initialize(world_size, rank)
        for key, value in before.items():
            os.environ.pop(key)
            if value is not None:
                os.environ[key] = value
        self.remark = f"DeepSpeed {version('deepspeed')}"
        forget_shared_memory(f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}")

    def allocate(self, numel: int) -> Tensor:
        return torch.empty(numel)

    def bind(self, operation: str, source: Tensor, target: Tensor) -> Run:
        all_reduce: Callable[[Tensor], object] = torch.ops.deepspeed.inference_all_reduce_
        return lambda: all_reduce(target)
