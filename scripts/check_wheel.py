"""Checks the contents of a torchddp wheel; used by build_wheel.py and join_wheels.py."""

import email
import re
import subprocess
import tempfile
import zipfile
from email.message import Message
from pathlib import Path

from scripts.check_symbols import symbol_problems

OF_THE_PACKAGE = ("__init__.py", "py.typed", "_C.pyi", "cli/__init__.py")
TO_COMPILE = ("pyproject.toml", "CMakeLists.txt", "cmake/driver.py", "cmake/build_in_cache.py", "csrc/common/errors.h")
NEEDED = [f"torchddp/{name}" for name in OF_THE_PACKAGE] + [f"torchddp/_source/{name}" for name in TO_COMPILE]
ONLY = re.compile(r"^(torchddp/|torchddp-[^/]+\.dist-info/)")
EXTENSION = re.compile(r"torchddp/_C-torch([\d.]+)-(cpu|cu\d+)\..*\.so")
# The folders of the libraries that come with torch, relative to site-packages.
RUNPATHS = {"cpu": ("torch/lib",), "cu12": ("torch/lib", "nvidia/cuda_runtime/lib", "nvidia/nccl/lib")}
RUNPATHS["cu13"] = ("torch/lib", "nvidia/cu13/lib", "nvidia/nccl/lib")


def wheel_problems(wheel: Path, kind: str, torch_minor: str, platform: str) -> list[str]:
    """Lists problems of a wheel for one torch, which must be this interpreter's, and "cpu" or "cuda"."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = read_metadata(archive)
        problems = content_problems(archive.namelist()) + tag_problems(wheel.name, platform)
        problems += metadata_problems(metadata, f"torch=={torch_minor}.*")
        found = extensions(archive)
        if len(found) != 1:
            return [*problems, f"expected one extension, found {', '.join(found) or 'none'}"]
        ((name, (covered, found_kind)),) = found.items()
        if covered != torch_minor or (found_kind == "cpu") != (kind == "cpu"):
            problems.append(f"the extension must be for torch {torch_minor} and {kind}, got {covered} and {found_kind}")
        if not str(metadata["Version"]).endswith(f"+{found_kind}.torch{torch_minor}"):
            problems.append(f"the version must end in +{found_kind}.torch{torch_minor}, got {metadata['Version']}")
        with tempfile.TemporaryDirectory() as folder:
            path = archive.extract(name, folder)
            problems += symbol_problems(Path(path))
            dynamic = subprocess.run(["readelf", "-dW", path], capture_output=True, text=True, check=True).stdout
    return problems + runpath_problems(dynamic, found_kind)


def extensions(archive: zipfile.ZipFile) -> dict[str, tuple[str, str]]:
    """By name in the archive: (2.13, cpu)."""
    matches = filter(None, map(EXTENSION.fullmatch, archive.namelist()))
    return {match[0]: (match[1], match[2]) for match in matches}


def read_metadata(archive: zipfile.ZipFile) -> Message:
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(archive.read(name))


def tag_problems(name: str, platform: str) -> list[str]:
    return [] if name.endswith(f"-{platform}.whl") else [f"the name must end in -{platform}.whl"]


def content_problems(names: list[str]) -> list[str]:
    problems = [f"{name} is missing" for name in NEEDED if name not in names]
    if not any(re.search(r"\.dist-info/(licenses/)?LICENSE$", name) for name in names):
        problems.append("the license is missing")
    return problems + [f"{name} does not belong in the wheel" for name in names if not ONLY.match(name)]


def metadata_problems(metadata: Message, wanted: str) -> list[str]:
    """`wanted`: the only requirement. Extras must not name torchddp, whose name on an index may be another's."""
    problems = []
    lines = metadata.get_all("Requires-Dist", [])
    required = [line for line in lines if ";" not in line]
    if required != [wanted]:
        problems.append(f"the only requirement must be {wanted}, got {required}")
    problems += [f"an extra requires torchddp itself: {line}" for line in lines if line.startswith("torchddp")]
    if "cli" not in metadata.get_all("Provides-Extra", []):
        problems.append("the extra 'cli' is missing")
    return problems


def runpath_problems(dynamic: str, kind: str) -> list[str]:
    """`dynamic` is the output of `readelf -d`."""
    found = re.search(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic)
    runpath = found.group(1).split(":") if found else []
    wanted = [f"$ORIGIN/../{folder}" for folder in RUNPATHS[kind[:4] if kind != "cpu" else "cpu"]]
    problems = [] if runpath == wanted else [f"the library path must be {':'.join(wanted)}, got {':'.join(runpath)}"]
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    # auditwheel adds a checksum to the names of bundled libraries: libgomp-a34b3233.so.1
    problems += [f"{name} is bundled" for name in needed if re.search(r"-[0-9a-f]{8}\.so", name)]
    return problems
