"""Describes the GPU, driver and libraries. Called by a rank, which has the device open anyway."""

from __future__ import annotations

import subprocess
from typing import Any

import torch


def first_line(text: str) -> str | None:
    """The first non-empty line."""
    return next((line.strip() for line in text.splitlines() if line.strip()), None)


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return first_line(done.stdout)


def describe_gpu(device: torch.device) -> dict[str, Any] | None:
    """The GPU's properties; None on a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": l2_bytes(device),
        "count": torch.cuda.device_count(),
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def l2_bytes(device: torch.device) -> int:
    """The size of the device's last-level cache; 0 on a CPU, where no measurement depends on it."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0
