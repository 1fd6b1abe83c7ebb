"""The check at import that the extension was built for the running Python, torch and CUDA."""

import sys
import sysconfig
from pathlib import Path

import pytest

from tests.programs import python
from torchddp import _C, _import_check
from torchddp._import_check import minor, misfit, parse_build_info, read_build_info, running_versions, wheel_advice

CPU = {"version": "0.1.0+cpu.torch2.13", "python": "3.11.7", "torch": "2.13.0+cpu", "cuda": ""}
CUDA = {"version": "0.1.0+cu130.torch2.13", "python": "3.11.7", "torch": "2.13.0+cu130", "cuda": "13.0.88"}
RUNNING = {"python": "3.11.9", "torch": "2.13.1+cu130", "cuda": "13.0"}
OWN_SUFFIX, OTHER_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX"), ".cpython-30-x86_64-linux-gnu.so"


@pytest.mark.parametrize("running", [{}, {"cuda": "13.2"}, {"torch": "2.13.0", "python": "3.11.0"}])
def test_compatible_versions_are_accepted(running):
    """A build without CUDA runs with every build of torch."""
    assert misfit(CPU, RUNNING | running) == misfit(CUDA, RUNNING | running) == ""


def test_a_misfit_is_reported_with_the_wheel_to_install():
    for built, running, words in (
        (CPU, {"torch": "2.12.1", "cuda": ""}, "built for torch 2.13.0+cpu, but torch 2.12.1 is running"),
        (CUDA, {"torch": "3.13.0"}, "built for torch 2.13.0+cu130, but torch 3.13.0 is running"),
        (CPU, {"python": "3.12.1"}, "built for Python 3.11.7, but this is Python 3.12.1"),
        (CUDA, {"torch": "2.13.0+cpu", "cuda": ""}, "with CUDA 13.0.88, but torch 2.13.0+cpu is a CPU build"),
        (CUDA, {"torch": "2.13.0+cu126", "cuda": "12.6"}, "torch 2.13.0+cu126 has CUDA 12.6"),
        (CUDA | {"cuda": "12.9.1"}, {}, "runs only extensions built with 13.0 to 13.0"),
        (CUDA | {"cuda": "13.2.51"}, {}, "built with CUDA 13.2.51, but torch 2.13.1+cu130 has CUDA 13.0"),
    ):
        assert words in misfit(built, RUNNING | running)
    for torch, cuda, words in (
        ("2.13.0+cpu", "", "torchddp==0.1.0+cpu.torch2.13 --index-url INDEX/torch-2.13/cpu/ "),
        ("2.12.1", "12.6", "torchddp==0.1.0+cu126.torch2.12 --index-url INDEX/torch-2.12/cu126/ "),
        ("2.14.0a0+git1234", "13.2.1", "torchddp==0.1.0+cu132.torch2.14 --index-url INDEX/torch-2.14/cu132/ "),
    ):
        advice = wheel_advice("0.1.0+cu130.torch2.13", {"torch": torch, "cuda": cuda})
        assert words in advice and "docs/install.md" in advice
        assert ("TORCHDDP_CUDA=1 pip install" in advice) is bool(cuda), torch


def write_extension(folder: Path, info: dict[str, str], suffix: str = OWN_SUFFIX) -> None:
    """A file with an extension's name that does not load, with build info among other bytes."""
    text = "torchddp build info\n" + "".join(f"{name}={value}\n" for name, value in info.items())
    (folder / f"_C{suffix}").write_bytes(b"\x7fELF\0torchddp build info\n\0" + text.encode() + b"\0archs=none\n\0")


def test_build_info_is_read_from_the_file_preferably_of_this_python(tmp_path):
    told = read_build_info(_import_check.PACKAGE_DIR)
    assert told == parse_build_info(_C.build_info)
    assert told["version"] == _C.version and minor(told["torch"]) == minor(running_versions()["torch"])
    assert minor(told["python"]) == sys.version_info[:2] and bool(told["cuda"]) is _C.with_cuda
    assert read_build_info(tmp_path) == {}
    (tmp_path / f"_C{OWN_SUFFIX}").write_bytes(b"\x7fELF, of something else")
    assert read_build_info(tmp_path) == {}
    write_extension(tmp_path, CUDA, OTHER_SUFFIX)
    assert read_build_info(tmp_path) == CUDA
    write_extension(tmp_path, CPU)
    assert read_build_info(tmp_path) == CPU


def package_without_extension(folder: Path) -> Path:
    """The package without its extension, so that a test can add another."""
    package = folder / "torchddp"
    package.mkdir()
    for path in _import_check.PACKAGE_DIR.iterdir():
        # Copied: a link would find the extension next to the original file.
        if path.name == "_import_check.py":
            (package / path.name).write_text(path.read_text())
        elif not path.name.startswith("_C"):
            (package / path.name).symlink_to(path)
    return package


# Without an editable installation's finders, which would find the extension anywhere.
NO_FINDER = "import sys; sys.meta_path = [f for f in sys.meta_path if not f.__module__.startswith('__editable__')]"


def import_error(folder: Path, before: str = NO_FINDER) -> str:
    done = python("-c", f"{before}\nimport torchddp", cwd=folder, PYTHONPATH=str(folder))
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("changes", "suffix", "words"),
    [
        ({"torch": "2.10.0"}, OWN_SUFFIX, "ImportError: torchddp was built for torch 2.10.0, but torch "),
        ({"python": "3.0.1"}, OTHER_SUFFIX, "ImportError: torchddp was built for Python 3.0.1, but "),
        ({}, OWN_SUFFIX, "ImportError: torchddp's compiled extension does not load with torch "),
    ],
)
def test_an_extension_that_does_not_load_is_diagnosed_from_its_file(tmp_path, changes, suffix, words):
    package = package_without_extension(tmp_path)
    write_extension(package, parse_build_info(_C.build_info) | {"version": "7.8.9"} | changes, suffix)
    told = import_error(tmp_path)
    assert told.startswith(words) and "torchddp==7.8.9+c" in told


def test_a_missing_extension_is_reported(tmp_path):
    package_without_extension(tmp_path)
    assert f"torchddp has no compiled extension in {tmp_path / 'torchddp'}. Install the wheel" in import_error(tmp_path)


def test_an_extension_that_loads_with_another_torch_is_refused():
    """A process with another version of torch must not load the extension's classes."""
    told = import_error(_import_check.PACKAGE_DIR.parent, before="import torch; torch.__version__ = '2.10.0'")
    assert "but torch 2.10.0 is running. Install the wheel for this torch" in told
