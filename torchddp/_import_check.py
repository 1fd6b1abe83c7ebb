"""Loads the extension that fits the running torch at `import torchddp`, or raises one error that says what to do.

The command must start even where the rest of the package can't.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from torchddp._extension import (
    MODULE,
    NAME,
    PACKAGE_DIR,
    SUFFIX,
    find,
    kind_name,
    load,
    minor,
    names_in,
    running_versions,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_BUILD_INFO = re.compile(rb"torchddp build info\n(?:\w+=[^\n\0]*\n)+")  # kBuildInfo of csrc/bindings/build_info.cpp


def load_extension() -> None:
    """Load `torchddp._C`, after compiling it if there is none and TORCHDDP_BUILD=1. ImportError if nothing fits."""
    if sys.modules.get(MODULE) is not None:
        return  # a program has put another in its place
    running = running_versions()
    path = find(running)
    if path is None and os.environ.get("TORCHDDP_BUILD") == "1":
        from torchddp._build import BuildError, build

        try:
            path = build(running)
        except BuildError as error:
            raise ImportError(f"TORCHDDP_BUILD=1: {error}") from None
    if path is None:
        raise ImportError(f"{not_covered(names_in(PACKAGE_DIR), running)}. {advice(running)}")
    try:
        load(path)
    except ImportError as error:
        raise ImportError(
            f"torchddp's compiled extension does not load with torch {running['torch']}: {error}. {advice(running)}"
        ) from error


def parse_build_info(text: str) -> dict[str, str]:
    """The entries by name; the first line is a heading."""
    return dict(line.split("=", 1) for line in text.splitlines()[1:])


def read_build_info(folder: Path) -> dict[str, str]:
    """The build info of an extension in ``folder``, without loading it: this Python's, or else another's; or {}."""
    names = [name for name in names_in(folder) if NAME.fullmatch(name)]
    for name in sorted(names, key=lambda name: (not name.endswith(SUFFIX), name)):
        if found := _BUILD_INFO.search((folder / name).read_bytes()):
            return parse_build_info(found[0].decode())
    return {}


# --- what does not fit (pure) ---


def not_covered(names: Iterable[str], running: Mapping[str, str]) -> str:
    """Why none of these files is an extension for these versions."""
    found = [match for match in map(NAME.fullmatch, sorted(names)) if match]
    own = [match for match in found if match["suffix"] == SUFFIX]
    if not own:
        pythons = sorted({match["suffix"].split("-")[1] for match in found if match["suffix"].count("-") > 1})
        others = f", but for cpython-{', cpython-'.join(pythons)}" if pythons else ""
        if (PACKAGE_DIR.parent / "setup.py").exists():
            others += ". This is the source folder: if torchddp is installed, run in another one"
        return f"torchddp has no compiled extension for Python {running['python']} in {PACKAGE_DIR}{others}"
    cuda = f" with CUDA {running['cuda']}" if running["cuda"] else ""
    kinds_of: dict[str, str] = {}
    for match in own:
        kinds_of[match["torch"]] = ", ".join(filter(None, (kinds_of.get(match["torch"]), match["kind"])))
    covered = [
        f"{', '.join(torch for torch in kinds_of if kinds_of[torch] == kinds)} ({kinds})"
        for kinds in dict.fromkeys(kinds_of.values())
    ]
    return f"torch {running['torch']}{cuda} is running, and torchddp has extensions for torch {' and '.join(covered)}"


def advice(running: Mapping[str, str]) -> str:
    """How to get an extension for the running torch."""
    needs = "g++, cmake and ninja" + (f", and nvcc {running['cuda']} for GPUs" if running["cuda"] else "")
    return (
        f"Compile one for this torch with `torchddp build` (two minutes; needs {needs}), or install another torch or "
        "torchddp: docs/install.md"
    )


def cuda_advice(cuda: str) -> str:
    """How to get the CUDA variant, where the CPU's is loaded and torch has this CUDA ("": none, as with ROCm)."""
    if not cuda:
        return "There is no CUDA variant for a torch without CUDA."
    return (
        f"`torchddp build` compiles the CUDA variant (needs nvcc of CUDA {minor(cuda)[0]}, not newer than {cuda}); or "
        f"install a wheel with {kind_name(cuda)}: docs/install.md"
    )
