"""Checks the contents of a torchddp wheel; used by build_wheel.py."""

import email
import re
import subprocess
import tempfile
import zipfile
from email.message import Message
from pathlib import Path

from scripts.check_symbols import symbol_problems

NEEDED = ("torchddp/__init__.py", "torchddp/py.typed", "torchddp/_C.pyi", "torchddp/cli/__init__.py")
ONLY = re.compile(r"^(torchddp/|torchddp-[^/]+\.dist-info/)")
# The folders of the libraries that come with torch, relative to site-packages.
RUNPATHS = {"cpu": ("torch/lib",), "cu12": ("torch/lib", "nvidia/cuda_runtime/lib", "nvidia/nccl/lib")}
RUNPATHS["cu13"] = ("torch/lib", "nvidia/cu13/lib", "nvidia/nccl/lib")


def wheel_problems(wheel: Path, variant: str, torch_minor: str, platform: str) -> list[str]:
    """Lists problems. Needs an interpreter with the torch it was built for. `platform`: e.g. manylinux_2_28_aarch64."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_name,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(metadata_name))
        problems = content_problems(names) + metadata_problems(metadata, variant, torch_minor)
        problems += tag_problems(wheel.name, platform)
        extensions = [name for name in names if re.fullmatch(r"torchddp/_C\..*\.so", name)]
        if len(extensions) != 1:
            return [*problems, f"expected one extension, found {len(extensions)}"]
        with tempfile.TemporaryDirectory() as folder:
            path = archive.extract(extensions[0], folder)
            problems += symbol_problems(Path(path))
            dynamic = subprocess.run(["readelf", "-dW", path], capture_output=True, text=True, check=True).stdout
    return problems + runpath_problems(dynamic, variant)


def tag_problems(name: str, platform: str) -> list[str]:
    return [] if name.endswith(f"-{platform}.whl") else [f"the name must end in -{platform}.whl"]


def content_problems(names: list[str]) -> list[str]:
    problems = [f"{name} is missing" for name in NEEDED if name not in names]
    if not any(re.search(r"\.dist-info/(licenses/)?LICENSE$", name) for name in names):
        problems.append("the license is missing")
    return problems + [f"{name} does not belong in the wheel" for name in names if not ONLY.match(name)]


def metadata_problems(metadata: Message, variant: str, torch_minor: str) -> list[str]:
    problems = []
    version = str(metadata["Version"])
    if not version.endswith(f"+{variant}.torch{torch_minor}"):
        problems.append(f"the version must end in +{variant}.torch{torch_minor}, got {version}")
    wanted = f"torch=={torch_minor}.*"
    required = [line for line in metadata.get_all("Requires-Dist", []) if ";" not in line]
    if required != [wanted]:
        problems.append(f"the only requirement must be {wanted}, got {required}")
    if "cli" not in metadata.get_all("Provides-Extra", []):
        problems.append("the extra 'cli' is missing")
    return problems


def runpath_problems(dynamic: str, variant: str) -> list[str]:
    """`dynamic` is the output of `readelf -d`."""
    found = re.search(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic)
    runpath = found.group(1).split(":") if found else []
    wanted = [f"$ORIGIN/../{folder}" for folder in RUNPATHS[variant[:4] if variant != "cpu" else "cpu"]]
    problems = [] if runpath == wanted else [f"the library path must be {':'.join(wanted)}, got {':'.join(runpath)}"]
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    # auditwheel adds a checksum to the names of bundled libraries: libgomp-a34b3233.so.1
    problems += [f"{name} is bundled" for name in needed if re.search(r"-[0-9a-f]{8}\.so", name)]
    return problems
