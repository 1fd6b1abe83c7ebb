"""The device of the tests in this folder: a GPU, or the CPU to check the tests themselves."""

import os

# Libraries read these variables at first use. Counting devices through the driver's management library leaves a
# process that forks ranks later without a CUDA context.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

DEVICE_ENV = "TORCHDDP_TEST_DEVICE"


def chosen_device() -> torch.device:
    """The first GPU, or the CPU if TORCHDDP_TEST_DEVICE says so."""
    name = os.environ.get(DEVICE_ENV, "cuda")
    if name not in ("cuda", "cpu"):
        raise ValueError(f"{DEVICE_ENV} must be cuda or cpu, got {name!r}")
    return torch.device("cuda", 0) if name == "cuda" else torch.device("cpu")


def why_not() -> str:
    """Why these tests cannot run here; empty if they can."""
    if chosen_device().type == "cpu" or torch.cuda.is_available():
        return ""
    build = "finds no GPU" if torch.version.cuda else "is a CPU build"
    return f"no CUDA device: torch {torch.__version__} {build} ({DEVICE_ENV}=cpu runs what needs none)"


def make_deterministic(device: torch.device) -> None:
    """Run the same kernels in the same order every time, so that two classes can be compared bitwise."""
    # Only warn about operators without a deterministic form: their cases would fail the comparison.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    # For the sanitizers new memory stays as it is, so that they see reads of what nobody wrote.
    torch.utils.deterministic.fill_uninitialized_memory = "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ
    if device.type == "cuda":
        torch.cuda.set_device(device)
