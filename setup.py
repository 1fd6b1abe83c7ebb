"""A thin shim: CMakeLists.txt describes the build, cmake/driver.py runs CMake and Ninja, pyproject.toml describes the
project. cmake/driver.py lists the environment variables; TORCHDDP_BUILD_DIR chooses the build folder.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "cmake"))
import driver  # noqa: E402  a script's folder is on the path, but pip's build backend does not run this as one
import torch_facts  # noqa: E402


def cuda_version() -> str:
    """Of nvcc, whose code runs with this and later CUDA of the same major version. Without nvcc, of torch."""
    if (nvcc := NAMES["find_nvcc"]()) is None:
        return FACTS["TORCH_CUDA"]
    os.environ["CUDACXX"] = nvcc
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    found = re.search(r"release (\d+\.\d+)", done.stdout)
    return found[1] if found else FACTS["TORCH_CUDA"]


NAMES = runpy.run_path(str(ROOT / "torchddp" / "_extension.py"))
FACTS = torch_facts.facts()
if driver.minor(setuptools.__version__) < (77, 0):
    raise SystemExit(
        f"torchddp: setuptools {setuptools.__version__} is too old, 77 or newer is needed; update it with: "
        f"{sys.executable} -m pip install --upgrade setuptools"
    )
driver.check_torch(ROOT, FACTS["TORCH_VERSION"])
TORCH_MINOR = "{}.{}".format(*driver.minor(FACTS["TORCH_VERSION"]))
KIND: str = NAMES["kind_name"](cuda_version() if driver.is_on("TORCHDDP_CUDA") else "")


class CMakeBuild(build_ext):
    """Hands the one extension to CMake, which writes it where setuptools expects it."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1]) / NAMES["file_name"](FACTS["TORCH_VERSION"], KIND))

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        default = ROOT / "build" / ("cpu" if KIND == "cpu" else "cuda")
        build_dir = Path(os.environ.get("TORCHDDP_BUILD_DIR") or default)
        driver.configure(ROOT, build_dir, target.parent, target.name)
        driver.build(build_dir, FACTS)

    def copy_extensions_to_source(self) -> None:
        """Atomically: an interrupted copy would look up to date, and processes may have the old file open."""
        for ext in self.extensions:
            target = Path(self.get_ext_fullpath(ext.name))
            partial = target.with_suffix(".partial")
            shutil.copy2(Path(self.build_lib, self.get_ext_filename(ext.name)), partial)
            partial.replace(target)


class WithSources(build_py):
    """Adds what the extension is compiled from, for `torchddp build`."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for pattern in NAMES["SOURCES"]:
            for path in ROOT.glob(pattern):
                target = Path(self.build_lib, "torchddp", "_source", path.relative_to(ROOT))
                self.mkpath(str(target.parent))
                self.copy_file(str(path), str(target))


def project_urls() -> dict[str, str]:
    """URLs of the repository whose workflow builds this; empty elsewhere, where the repository is unknown."""
    if "GITHUB_REPOSITORY" not in os.environ:
        return {}
    home = f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}"
    pages = {"Documentation": "blob/main/docs/install.md", "Changelog": "blob/main/CHANGELOG.md", "Issues": "issues"}
    return {"Source": home} | {name: f"{home}/{page}" for name, page in pages.items()}


setup(
    # +cpu.torch2.13 or +cu130.torch2.13: it works with nothing else. scripts/join_wheels.py makes one wheel of several.
    version=f"{driver.project_value(ROOT, 'version')}+{KIND}.torch{TORCH_MINOR}",
    install_requires=[f"torch=={TORCH_MINOR}.*"],
    project_urls=project_urls(),
    ext_modules=[Extension("torchddp._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": WithSources},
)
