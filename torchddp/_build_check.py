"""Compares the torch that the extension was built for with the one that runs, before anything uses the extension.

libtorch's C++ interface changes between minor versions without its symbols changing: a mismatch does not fail to
load, it crashes later. One readable error instead.
"""

import torch

REBUILD = (
    "Install the torchddp wheel for your torch, or rebuild it here: "
    "pip install --no-build-isolation --force-reinstall torchddp"
)


def minor(version: str) -> tuple[int, int]:
    """(2, 13) of '2.13.0+cpu'."""
    major_text, minor_text = version.split("+")[0].split(".")[:2]
    return int(major_text), int(minor_text)


def check_torch_matches(built: str | None = None, running: str | None = None) -> None:
    """Raise ImportError unless the extension exists and was built for the running torch's major.minor."""
    running = running or str(torch.__version__)
    if built is None:
        try:
            from torchddp import _C
        except ImportError as error:
            raise ImportError(
                f"torchddp's compiled extension does not load with torch {running}: {error}. "
                f"It is missing, or was built for another Python or torch. {REBUILD}"
            ) from error
        built = str(_C.torch_version)
    if minor(built) != minor(running):
        raise ImportError(f"torchddp was built for torch {built}, but torch {running} is running. {REBUILD}")
