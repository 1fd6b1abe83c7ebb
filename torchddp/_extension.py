"""The compiled extension that fits the running Python, torch and CUDA: where it is, and loading it as `torchddp._C`.

A package may hold several, a file for each minor version of torch, for the CPU and for each version of CUDA:
`_C-torch2.13-cpu.cpython-311-x86_64-linux-gnu.so`. libtorch's C++ interface changes between minor versions while its
symbols keep their names, so another file would load and crash later. `torchddp build` adds files to the user's cache.

Imports nothing of the package: setup.py takes the names from here.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import sysconfig
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import ModuleType

PACKAGE_DIR = Path(__file__).resolve().parent
MODULE = "torchddp._C"
SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
NAME = re.compile(r"_C-torch(?P<torch>[^-]+)-(?P<kind>cpu|cu\d+)(?P<suffix>\..+)")
# Releases of one minor version share an interface. Other builds of torch (nightlies, vendors' own) need their own file.
RELEASE = re.compile(r"(\d+\.\d+)\.\d+(?:\.post\d+)?(?:\+(?:cpu|cu\d+))?")
CPU = "cpu"
CACHE_ENV = "TORCHDDP_CACHE_DIR"
SOURCES = ("pyproject.toml", "CMakeLists.txt", "cmake/*.*", "csrc/**/*.*")


def running_versions() -> dict[str, str]:
    """Versions of Python, torch and its CUDA ("" for a CPU build), named as in the extension's build info, and torch's
    C++ ABI flag, "0" or "1"."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or ""),
        "abi": str(int(torch.compiled_with_cxx11_abi())),
    }


# --- names (pure) ---


def torch_part(version: str) -> str:
    """What a file's name says of torch: 2.13 for a release, the full version for another build."""
    release = RELEASE.fullmatch(version)
    return release[1] if release else version.replace("-", "_")


def kind_name(cuda: str) -> str:
    """ "cpu", or "cu130" for CUDA 13.0 or 13.0.88."""
    return "cu{}{}".format(*minor(cuda)) if cuda else CPU


def file_name(torch: str, kind: str) -> str:
    return f"_C-torch{torch_part(torch)}-{kind}{SUFFIX}"


def minor(version: str) -> tuple[int, int]:
    """(2, 13) of '2.13.0+cpu'."""
    major_text, minor_text = version.split("+")[0].split(".")[:2]
    return int(major_text), int(minor_text)


def best(names: Iterable[str], torch: str, cuda: str) -> str | None:
    """The file to load: the newest CUDA that this torch's CUDA runs, or else the CPU's, which any build of torch runs.

    NVIDIA's libraries run code of the same major version that isn't newer.
    """
    fitting: dict[int, str] = {}
    for name in names:
        found = NAME.fullmatch(name)
        if found is None or found["torch"] != torch_part(torch) or found["suffix"] != SUFFIX:
            continue
        if found["kind"] == CPU:
            fitting[0] = name
        elif cuda and int(found["kind"][2:-1]) == minor(cuda)[0] and found["kind"] <= kind_name(cuda):
            fitting[int(found["kind"][2:])] = name
    return fitting[max(fitting)] if fitting else None


# --- files ---


def find_nvcc() -> str | None:
    """The CUDA compiler: $CUDACXX, that of $CUDA_HOME, or the one on the path."""
    from shutil import which

    home = os.environ.get("CUDA_HOME")
    return os.environ.get("CUDACXX") or (home and which("nvcc", path=os.path.join(home, "bin"))) or which("nvcc")


def find(running: Mapping[str, str]) -> Path | None:
    """The extension for these versions, of the package or of the user's cache, which may have a better one."""
    own = best(names_in(PACKAGE_DIR), running["torch"], running["cuda"])
    if own is None or (running["cuda"] and f"-{CPU}." in own):
        folder = cache_folder(running) if (cache := built_dir()) and os.path.isdir(cache) else None
        built = best(names_in(folder), running["torch"], running["cuda"]) if folder and is_private(folder) else None
        if folder and built and (own is None or f"-{CPU}." not in built):
            return folder / built
    return PACKAGE_DIR / own if own else None


def load(path: Path) -> ModuleType:
    """Load the file as `torchddp._C`, of which a process has one. ImportError if it does not load."""
    from importlib.machinery import ExtensionFileLoader
    from importlib.util import module_from_spec, spec_from_file_location

    if (loaded := sys.modules.get(MODULE)) is not None:
        raise ImportError(f"{loaded.__file__} is already loaded, and {path} would be a second torchddp in one process")
    spec = spec_from_file_location(MODULE, path, loader=ExtensionFileLoader(MODULE, str(path)))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[MODULE] = module
    vars(sys.modules["torchddp"])["_C"] = module  # as `import torchddp._C` would
    return module


def source_dir() -> Path | None:
    """What the extension is compiled from: beside the package in a checkout, inside it elsewhere."""
    for folder in (PACKAGE_DIR / "_source", PACKAGE_DIR.parent):
        if (folder / "CMakeLists.txt").exists() and (folder / "csrc").is_dir():
            return folder
    return None


def user_cache() -> Path | None:
    """The folder for what torchddp keeps for this user; None without a home directory, as in some containers."""
    if chosen := os.environ.get(CACHE_ENV):
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchddp"
    except RuntimeError:
        return None


def built_dir() -> Path | None:
    """What `torchddp build` has built for this user."""
    cache = user_cache()
    return cache / "extensions" if cache else None


def cache_folder(running: Mapping[str, str]) -> Path | None:
    """Where it puts the extension for these versions and this version of the sources; None if it can't build one."""
    cache, sources = built_dir(), source_dir()
    if cache is None or sources is None:
        return None
    torch = running["torch"].replace("-", "_")
    return cache / _digest(sources) / f"torch{torch}-{kind_name(running['cuda'])}-abi{running['abi']}"


def is_private(folder: Path) -> bool:
    """Whether nobody but this user (and root) can have put a file into it."""
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o022


def _digest(sources: Path) -> str:
    from hashlib import sha256

    said = sha256()
    for pattern in SOURCES:
        for path in sorted(sources.glob(pattern)):
            if path.is_file():
                said.update(path.read_bytes())
    return said.hexdigest()[:16]


def names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
