"""Checks at `import torchddp` that the extension fits the running torch.

libtorch's C++ interface changes between minor versions while its symbols keep their names, so a mismatched extension
loads and crashes later. If CUDA or Python don't fit, the loader's message doesn't help. This raises one readable error
that names the wheel to install. The command must start even where the rest of the package can't.
"""

from __future__ import annotations

import platform
import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path

PACKAGE_DIR = Path(__file__).resolve().parent
_BUILD_INFO = re.compile(rb"torchddp build info\n(?:\w+=[^\n\0]*\n)+")  # kBuildInfo of csrc/bindings/module.cpp


def check_extension() -> None:
    """Raise ImportError unless the extension loads and was built for the running Python, torch and CUDA."""
    running = running_versions()
    try:
        from torchddp import _C
    except ImportError as error:
        built = read_build_info(PACKAGE_DIR)
        reason = f"torchddp's compiled extension does not load with torch {running['torch']}: {error}"
        if not any(PACKAGE_DIR.glob("_C*.so")):
            reason = f"torchddp has no compiled extension in {PACKAGE_DIR}"
        if built:
            reason = misfit(built, running) or reason
        raise ImportError(f"{reason}. {wheel_advice(built.get('version', ''), running)}") from error
    built = parse_build_info(_C.build_info)
    if reason := misfit(built, running):
        raise ImportError(f"{reason}. {wheel_advice(built['version'], running)}")


def running_versions() -> dict[str, str]:
    """Versions of Python, torch and its CUDA ("" for a CPU build), named as in the extension's build info."""
    import torch

    cuda = str(torch.version.cuda or "")
    return {"python": platform.python_version(), "torch": str(torch.__version__), "cuda": cuda}


def parse_build_info(text: str) -> dict[str, str]:
    """The entries by name; the first line is a heading."""
    return dict(line.split("=", 1) for line in text.splitlines()[1:])


def read_build_info(folder: Path) -> dict[str, str]:
    """The build info of an extension in ``folder``, without loading it: this Python's, or else another's; or {}."""
    own = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    for path in sorted(folder.glob("_C*.so"), key=lambda path: path.name != own):
        if found := _BUILD_INFO.search(path.read_bytes()):
            return parse_build_info(found[0].decode())
    return {}


# --- what does not fit (pure) ---


def misfit(built: Mapping[str, str], running: Mapping[str, str]) -> str:
    """Why an extension built for these versions can't run with those; empty if it can."""
    torch, cuda = running["torch"], running["cuda"]
    if minor(built["python"]) != minor(running["python"]):
        return f"torchddp was built for Python {built['python']}, but this is Python {running['python']}"
    if minor(built["torch"]) != minor(torch):
        return f"torchddp was built for torch {built['torch']}, but torch {torch} is running"
    if not built["cuda"]:
        return ""  # it moves CUDA tensors too, through the process group
    if not cuda:
        return f"torchddp was built with CUDA {built['cuda']}, but torch {torch} is a CPU build"
    # NVIDIA's libraries also run code built with an older version of the same major release.
    if not (minor(cuda)[0], 0) <= minor(built["cuda"]) <= minor(cuda):
        return (
            f"torchddp was built with CUDA {built['cuda']}, but torch {torch} has CUDA {cuda}, which runs only "
            f"extensions built with {minor(cuda)[0]}.0 to {cuda}"
        )
    return ""


def wheel_advice(version: str, running: Mapping[str, str]) -> str:
    """Which wheel fits and how to get it. ``version``: torchddp's, with or without its local part; "" if unknown."""
    torch = ".".join(map(str, minor(running["torch"])))
    variant = "cu{}{}".format(*minor(running["cuda"])) if running["cuda"] else "cpu"
    wheel = f"torchddp=={version.split('+')[0]}+{variant}.torch{torch}" if version else "torchddp"
    switch = "TORCHDDP_CUDA=1 " if running["cuda"] else ""
    return (
        f"Install the wheel for this torch: pip install --force-reinstall --no-deps {wheel} --index-url "
        f"INDEX/torch-{torch}/{variant}/ (INDEX: where torchddp's wheels are, see docs/install.md), or build it in a "
        f"checkout: {switch}pip install --force-reinstall --no-deps --no-build-isolation ."
    )


def minor(version: str) -> tuple[int, int]:
    """(2, 13) of '2.13.0+cpu'."""
    major_text, minor_text = version.split("+")[0].split(".")[:2]
    return int(major_text), int(minor_text)
