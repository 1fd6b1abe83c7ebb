"""Loads the simulated GPU in the place of torchddp's compiled module. Import it before torchddp, in a new process."""

import importlib.util
import sys
import types
from pathlib import Path

import torch

BUILD = Path(__file__).parents[2] / "build" / "cpu"  # where the target "simulated_gpu" lies
NAME = "simgpu"


def _load(name: str, path: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


assert "torchddp" not in sys.modules
_path = str(next(BUILD.glob("simulated_gpu.*.so")))
_load("torchddp._C", _path)
simulated = _load("torchddp._simulated", _path)

torch.utils.rename_privateuse1_backend(NAME)
_module = types.ModuleType(f"torch.{NAME}")
vars(_module).update(
    is_available=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: 0,
    _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda _seed: None,
    get_amp_supported_dtype=lambda: [],
)
torch._register_device_module(NAME, _module)
