"""Which compiled extension `import torchddp` loads, and what it says if none fits."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.programs import python
from torchddp import _C, _extension
from torchddp._extension import (
    PACKAGE_DIR,
    SUFFIX,
    best,
    cache_folder,
    file_name,
    find,
    kind_name,
    minor,
    running_versions,
    torch_part,
)
from torchddp._import_check import cuda_advice, not_covered, parse_build_info, read_build_info

RUNNING = {"python": "3.11.9", "torch": "2.13.1+cu130", "cuda": "13.0", "abi": "1"}
OTHER_SUFFIX = ".cpython-30-x86_64-linux-gnu.so"


def test_releases_of_a_minor_version_share_an_extension_and_other_builds_do_not() -> None:
    for version in ("2.13.0", "2.13.1+cpu", "2.13.0+cu130", "2.13.0.post1"):
        assert torch_part(version) == "2.13"
    for version in ("2.14.0a0+git1234", "2.14.0.dev20261101+cpu", "2.13.0+rocm6.4", "2.11.0a0+5228986c39.nv25.06"):
        assert torch_part(version) == version
    assert file_name("2.13.1+cpu", "cpu") == f"_C-torch2.13-cpu{SUFFIX}"
    assert kind_name("") == "cpu" and kind_name("13.0.88") == "cu130" and minor("2.9.1+cpu") == (2, 9)


def names(*kinds: str, torch: str = "2.13", suffix: str = SUFFIX) -> list[str]:
    return [f"_C-torch{torch}-{kind}{suffix}" for kind in kinds]


@pytest.mark.parametrize(
    ("kinds", "cuda", "chosen"),
    [
        (["cpu"], "", "cpu"),
        (["cpu", "cu130"], "", "cpu"),
        (["cu130"], "", None),
        (["cpu"], "13.0", "cpu"),  # it moves CUDA tensors too, through the process group
        (["cpu", "cu130"], "13.0", "cu130"),
        (["cpu", "cu126", "cu128", "cu130", "cu132"], "13.2", "cu132"),
        # NVIDIA's libraries run code of the same major version that is not newer.
        (["cpu", "cu126", "cu128", "cu132"], "13.0", "cpu"),
        (["cpu", "cu126", "cu130"], "12.9", "cu126"),
        ([], "13.0", None),
    ],
)
def test_the_newest_extension_that_this_cuda_runs_is_chosen(kinds: list[str], cuda: str, chosen: str | None) -> None:
    others = names("cpu", "cu130", torch="2.12") + names("cpu", suffix=OTHER_SUFFIX) + ["_C.pyi", f"_C{SUFFIX}"]
    (wanted,) = names(chosen) if chosen else [None]
    assert best([*others, *names(*kinds)], "2.13.0", cuda) == wanted
    assert best([*names(*kinds), *others], "2.13.1+cpu", cuda) == wanted
    assert best(names(*kinds), "2.13.0a0+git1234", cuda) is None


def test_what_is_not_covered_is_said_in_one_sentence() -> None:
    for files, running, words in (
        (names("cu130", "cpu", torch="2.14"), {}, "torch 2.13.1+cu130 with CUDA 13.0 is running, and torchddp has "),
        (names("cu130", "cpu", torch="2.14"), {}, "has extensions for torch 2.14 (cpu, cu130)"),
        (
            [name for torch in ("2.14", "2.11", "2.12") for name in names("cu130", "cpu", torch=torch)]
            + names("cpu", torch="2.15"),
            {},
            "has extensions for torch 2.11, 2.12, 2.14 (cpu, cu130) and 2.15 (cpu)",
        ),
        (names("cu130"), {"torch": "2.13.0", "cuda": ""}, "torch 2.13.0 is running, and torchddp has extensions for"),
        (names("cpu", suffix=OTHER_SUFFIX), {}, f"for Python 3.11.9 in {PACKAGE_DIR}, but for cpython-30"),
        ([], {}, f"torchddp has no compiled extension for Python 3.11.9 in {PACKAGE_DIR}"),
    ):
        assert words in not_covered(files, RUNNING | running)
    assert cuda_advice("") == "There is no CUDA variant for a torch without CUDA."
    assert "nvcc of CUDA 12, not newer than 12.8); or install a wheel with cu128" in cuda_advice("12.8")


def test_an_import_in_the_source_folder_is_named_as_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchddp._import_check.PACKAGE_DIR", tmp_path / "torchddp")
    assert "source folder" not in not_covered([], RUNNING)
    (tmp_path / "setup.py").touch()
    assert "This is the source folder: if torchddp is installed, run in another one" in not_covered([], RUNNING)


def write_extension(folder: Path, name: str, info: dict[str, str] | None = None) -> Path:
    """A file with an extension's name that does not load, with build info among other bytes."""
    text = "torchddp build info\n" + "".join(f"{key}={value}\n" for key, value in (info or {}).items())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / name).write_bytes(b"\x7fELF\0torchddp build info\n\0" + text.encode() + b"\0archs=none\n\0")
    return folder / name


def test_build_info_is_read_from_the_file_preferably_of_this_python(tmp_path: Path) -> None:
    told = read_build_info(PACKAGE_DIR)
    assert told == parse_build_info(_C.build_info) and told["version"] == _C.version
    running = running_versions()
    assert minor(told["torch"]) == minor(running["torch"]) and running["abi"] == "1"
    assert minor(told["python"]) == sys.version_info[:2] and bool(told["cuda"]) is _C.with_cuda
    assert read_build_info(tmp_path) == {}
    write_extension(tmp_path, f"_C-torch2.13-cpu{OTHER_SUFFIX}", {"version": "1"})
    assert read_build_info(tmp_path) == {"version": "1"}
    write_extension(tmp_path, f"_C-torch2.13-cpu{SUFFIX}", {"version": "2"})
    assert read_build_info(tmp_path) == {"version": "2"}


def home_of_nobody() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_the_users_cache_has_what_the_package_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(_extension, "PACKAGE_DIR", package)
    monkeypatch.setattr(_extension, "source_dir", lambda: PACKAGE_DIR.parent)
    monkeypatch.setenv("TORCHDDP_CACHE_DIR", str(tmp_path / "cache"))
    cache = cache_folder(RUNNING)
    assert cache is not None and find(RUNNING) is None
    # By torch's full version, CUDA and ABI flag, and what it is compiled from.
    assert cache.name == "torch2.13.1+cu130-cu130-abi1"
    others = [cache_folder(RUNNING | change) for change in ({"torch": "2.13.0"}, {"cuda": ""}, {"abi": "0"})]
    assert len({cache, *others}) == 4
    built = write_extension(cache, *names("cpu"))
    assert find(RUNNING) == built and find(RUNNING | {"torch": "2.13.0"}) is None
    own = write_extension(package, *names("cpu"))
    assert find(RUNNING) == own  # the same kind
    with monkeypatch.context() as unusable:
        unusable.setenv("TORCHDDP_CACHE_DIR", "x" * 300)  # OSError, as for the home of another user
        assert find(RUNNING) == own
    built = write_extension(cache, *names("cu130"))
    assert find(RUNNING) == built  # a better one
    cache.chmod(0o777)
    assert find(RUNNING) == own  # anyone may have written that
    cache.chmod(0o700)
    assert find(RUNNING) == built
    own = write_extension(package, *names("cu130"))
    assert find(RUNNING) == own
    for name in ("TORCHDDP_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home_of_nobody)
    assert find(RUNNING) == own and cache_folder(RUNNING) is None


def package_without_extension(folder: Path) -> Path:
    """The package without its extension, so that a test can add another."""
    package = folder / "torchddp"
    package.mkdir()
    for path in PACKAGE_DIR.iterdir():
        # Copied: a link would find the extension next to the original file.
        if path.name == "_extension.py":
            (package / path.name).write_text(path.read_text())
        elif not path.name.startswith("_C"):
            (package / path.name).symlink_to(path)
    return package


# Without an editable installation's finders, which would find the extension anywhere.
NO_FINDER = "import sys; sys.meta_path = [f for f in sys.meta_path if not f.__module__.startswith('__editable__')]"


# Imports again after each file that is added to the package.
IMPORTS = f"""{NO_FINDER}
import importlib, pathlib
for name in ["", *sys.argv[2:]]:
    if name:
        pathlib.Path(sys.argv[1], name).write_bytes(b"\\x7fELF")
    importlib.invalidate_caches()
    try:
        importlib.import_module("torchddp")
    except ImportError as error:
        print(error)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchddp"]:
        del sys.modules[name]
"""


def test_an_extension_that_is_missing_or_does_not_load_is_reported(tmp_path: Path) -> None:
    package = package_without_extension(tmp_path)
    torch = running_versions()["torch"]
    added = f"_C-torch2.13-cpu{OTHER_SUFFIX}", file_name(torch, "cpu")
    variables = {"PYTHONPATH": str(tmp_path), "TORCHDDP_CACHE_DIR": str(tmp_path / "cache")}
    done = python("-c", IMPORTS, str(package), *added, cwd=tmp_path, **variables)
    missing, of_another_python, broken = done.stdout.splitlines()
    assert f"in {package}. Compile one for this torch with `torchddp build`" in missing
    assert "but for cpython-30. Compile one" in of_another_python
    assert broken.startswith(f"torchddp's compiled extension does not load with torch {torch}: ")
    assert "Compile one for this torch with `torchddp build`" in broken


def test_with_another_torch_nothing_is_loaded(tmp_path: Path) -> None:
    """A process with another version of torch must not load the extension's classes."""
    code = """import torch; torch.__version__ = '2.10.0'
try:
    import torchddp
finally:
    print([line for line in open('/proc/self/maps') if '_C-' in line])"""
    done = python("-c", code, TORCHDDP_CACHE_DIR=str(tmp_path))
    assert done.returncode == 1 and done.stdout == "[]\n"
    assert re.search(r"torch 2\.10\.0.* is running, and torchddp has extensions for torch 2\.", done.stderr)


def test_a_process_can_not_load_two_extensions(tmp_path: Path) -> None:
    copy = tmp_path / "_C-torch2.99-cpu.so"
    shutil.copy(str(_C.__file__), copy)
    code = "import pathlib, sys, torchddp; from torchddp import _extension; _extension.load(pathlib.Path(sys.argv[1]))"
    done = python("-c", code, str(copy))
    assert done.returncode == 1 and "is already loaded" in done.stderr.splitlines()[-1], done.stderr
