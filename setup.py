"""A thin shim over CMake and Ninja: CMakeLists.txt describes the build, pyproject.toml the project.

From the environment: TORCHDDP_CUDA=1 (build the CUDA variant), TORCHDDP_WERROR=1 (warnings are errors),
TORCHDDP_UNITY=0 (sources of a folder each by itself) and MAX_JOBS=N.
For wheels, by scripts/build_wheel.py: TORCHDDP_LOCAL_VERSION=cpu.torch2.13 and TORCHDDP_TORCH_REQUIREMENT===2.13.*.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def tool(name: str) -> str:
    """The path of cmake or ninja: this interpreter's own (installed by pip) first, then the system's."""
    beside_python = str(Path(sys.executable).parent)
    found = shutil.which(name, path=beside_python) or shutil.which(name)
    if found is None:
        raise SystemExit(f"torchddp: {name} was not found; install it with: {sys.executable} -m pip install {name}")
    return found


def switch(name: str, default: str = "") -> str:
    """An ON/OFF option for CMake from the environment variable of the same name."""
    on = os.environ.get(name, default).upper() in {"1", "ON", "TRUE", "YES"}
    return f"-D{name}={'ON' if on else 'OFF'}"


def written_down(name: str) -> str:
    """The value of a line `name = "..."` of pyproject.toml, which no Python before 3.11 can parse by itself."""
    line = re.search(rf'^{name} = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if line is None:
        raise SystemExit(f"torchddp: found no line '{name} = \"...\"' in {ROOT / 'pyproject.toml'}.")
    return line.group(1)


def local_version() -> str:
    local = os.environ.get("TORCHDDP_LOCAL_VERSION", "")
    return f"+{local}" if local else ""


class CMakeBuild(build_ext):
    """Hands the one extension to CMake, which writes it where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        output_dir = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        variant = "cuda" if switch("TORCHDDP_CUDA").endswith("ON") else "cpu"
        build_dir = ROOT / "build" / variant
        configure = [tool("cmake"), "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"]
        configure += [
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DTORCHDDP_PYTHON={sys.executable}",
            f"-DTORCHDDP_OUTPUT_DIR={output_dir}",
            f"-DTORCHDDP_LOCAL_VERSION={local_version()}",
            switch("TORCHDDP_CUDA"),
            switch("TORCHDDP_WERROR"),
            switch("TORCHDDP_UNITY", default="ON"),
        ]
        build = [tool("cmake"), "--build", str(build_dir)]
        if jobs := os.environ.get("MAX_JOBS"):
            build += ["--parallel", jobs]
        for command in (configure, build):
            done = subprocess.run(command)
            if done.returncode:
                raise SystemExit(f"torchddp: '{' '.join(command[:3])} ...' failed; the reason stands above.")


setup(
    version=written_down("version") + local_version(),
    install_requires=[f"torch{os.environ.get('TORCHDDP_TORCH_REQUIREMENT') or written_down('torch-range')}"],
    ext_modules=[Extension("torchddp._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
