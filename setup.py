"""A thin shim over CMake and Ninja: CMakeLists.txt describes the build, pyproject.toml the project.

Environment variables: TORCHDDP_CUDA=1 (build the CUDA variant), TORCHDDP_WERROR=1 (warnings are errors),
TORCHDDP_UNITY=0 (compile each source by itself) and MAX_JOBS=N.
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

ROOT = Path(__file__).resolve().parent
# An error message from our CMake files, which CMake wraps and indents.
CMAKE_ERROR = re.compile(r"^  (torchddp: .+\n(?:  .+\n)*)", re.MULTILINE)


def tool(name: str) -> str:
    """The path of cmake or ninja: this interpreter's own (installed by pip) first, then the system's."""
    beside_python = str(Path(sys.executable).parent)
    found = shutil.which(name, path=beside_python) or shutil.which(name)
    if found is None:
        raise SystemExit(f"torchddp: {name} was not found; install it with: {sys.executable} -m pip install {name}")
    return found


def is_on(name: str, default: str = "") -> bool:
    return os.environ.get(name, default).upper() in {"1", "ON", "TRUE", "YES"}


def option(name: str, default: str = "") -> str:
    """An ON/OFF option for CMake from the environment variable of the same name."""
    return f"-D{name}={'ON' if is_on(name, default) else 'OFF'}"


def project_value(name: str) -> str:
    """The value of a line `name = "..."` of pyproject.toml. Python before 3.11 has no TOML parser."""
    line = re.search(rf'^{name} = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if line is None:
        raise SystemExit(f"torchddp: found no line '{name} = \"...\"' in {ROOT / 'pyproject.toml'}.")
    return line.group(1)


def minor(version: str) -> tuple[int, int]:
    """(2, 13) of 2.13.0+cpu."""
    numbers = version.split("+")[0].split(".")
    return int(numbers[0]), int(numbers[1])


def check_versions(torch: str) -> None:
    if minor(setuptools.__version__) < (77, 0):
        raise SystemExit(
            f"torchddp: setuptools {setuptools.__version__} is too old, 77 or newer is needed; update it with: "
            f"{sys.executable} -m pip install --upgrade setuptools"
        )
    oldest, beyond = (minor(bound) for bound in re.findall(r"[\d.]+", project_value("torch-range")))
    if not oldest <= minor(torch) < beyond:
        raise SystemExit(
            f"torchddp: torch {torch} is installed, and torchddp {project_value('version')} supports torch "
            f"{project_value('torch-range')}"
        )


def discard_stale(build_dir: Path) -> None:
    """Delete a build folder of another checkout, or one whose compiler is gone: CMake refuses both."""
    cache = build_dir / "CMakeCache.txt"
    if not cache.exists():
        return
    entries = dict(re.findall(r"^(\w+):\w+=(.*)$", cache.read_text(), re.MULTILINE))
    of_this_checkout = (entries.get("CMAKE_HOME_DIRECTORY"), entries.get("CMAKE_CACHEFILE_DIR")) == (
        str(ROOT),
        str(build_dir),
    )
    compilers = [entries[name] for name in ("CMAKE_CXX_COMPILER", "CMAKE_CUDA_COMPILER") if name in entries]
    if not of_this_checkout or not all(map(os.path.exists, compilers)):
        print(f"torchddp: {build_dir} belongs to another checkout or compiler; rebuilding it from scratch", flush=True)
        shutil.rmtree(build_dir)


def configure(command: list[str]) -> None:
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode and (ours := CMAKE_ERROR.search(done.stderr)):
        raise SystemExit(" ".join(ours[1].split()))  # one sentence, because pip shows only the last lines
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise SystemExit(f"torchddp: '{' '.join(command[:3])} ...' failed; see CMake's message above.")


FACTS: dict[str, str] = runpy.run_path(str(ROOT / "cmake" / "torch_facts.py"))["facts"]()
check_versions(FACTS["TORCH_VERSION"])
TORCH_MINOR = "{}.{}".format(*minor(FACTS["TORCH_VERSION"]))
WITH_CUDA = is_on("TORCHDDP_CUDA")
# The version's suffix, +cpu.torch2.13 or +cu130.torch2.13: a wheel works with nothing else.
LOCAL_VERSION = f"+{'cu' + FACTS['TORCH_CUDA'].replace('.', '') if WITH_CUDA else 'cpu'}.torch{TORCH_MINOR}"


class CMakeBuild(build_ext):
    """Hands the one extension to CMake, which writes it where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        output_dir = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build_dir = ROOT / "build" / ("cuda" if WITH_CUDA else "cpu")
        discard_stale(build_dir)
        command = [tool("cmake"), "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"]
        command += [
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DTORCHDDP_PYTHON={sys.executable}",
            f"-DTORCHDDP_OUTPUT_DIR={output_dir}",
            f"-DTORCHDDP_LOCAL_VERSION={LOCAL_VERSION}",
            option("TORCHDDP_CUDA"),
            option("TORCHDDP_WERROR"),
            option("TORCHDDP_UNITY", default="ON"),
        ]
        first = not (build_dir / ".ninja_log").exists()
        configure(command)
        if first:
            print(f"torchddp: compiling for torch {FACTS['TORCH_VERSION']}: about 100 s on two cores", flush=True)
        build = [tool("cmake"), "--build", str(build_dir)]
        if jobs := os.environ.get("MAX_JOBS"):
            build += ["--parallel", jobs]
        if subprocess.run(build).returncode:
            raise SystemExit("torchddp: the extension does not compile; see the compiler's message above.")

    def copy_extensions_to_source(self) -> None:
        """Atomically: an interrupted copy would look up to date, and processes may have the old file open."""
        for ext in self.extensions:
            target = Path(self.get_ext_fullpath(ext.name))
            partial = target.with_suffix(".partial")
            shutil.copy2(Path(self.build_lib, self.get_ext_filename(ext.name)), partial)
            partial.replace(target)


def project_urls() -> dict[str, str]:
    """URLs of the repository whose workflow builds this; empty elsewhere, where the repository is unknown."""
    if "GITHUB_REPOSITORY" not in os.environ:
        return {}
    home = f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}"
    pages = {"Documentation": "blob/main/docs/install.md", "Changelog": "blob/main/CHANGELOG.md", "Issues": "issues"}
    return {"Source": home} | {name: f"{home}/{page}" for name, page in pages.items()}


setup(
    version=project_value("version") + LOCAL_VERSION,
    install_requires=[f"torch=={TORCH_MINOR}.*"],
    project_urls=project_urls(),
    ext_modules=[Extension("torchddp._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
