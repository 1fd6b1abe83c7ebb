"""What a type checker and an interactive shell see of the package: public names, literal choices, a path to follow."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import get_args

import pytest
import torch

import torchddp
from torchddp.ddp import options
from torchddp.ddp.options import DDPOptions, DDPSyncStrategy
from torchddp.transport import select

ROOT = Path(__file__).resolve().parents[2]
MODULES = """averaging comm_hooks composable distributed fault_tolerance integrations optim parallel profiler
    sync""".split()
BUILT_IN_TRANSPORTS, _ = get_args(options.TransportChoice)  # the other one is for registered names


def run(code: str, **options: object) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_dir_shows_the_public_names_and_nothing_else() -> None:
    names = """DDP DesyncError DistributedDataParallel InternalError ParallelConfig PeerFailedError ShardedDataParallel
        TransportError UsageWarning __version__ check_parameters fail_together finished_steps install installed
        parallel_group_info parallelize replicate uninstall watch_collectives""".split()
    assert sorted(torchddp.__all__) == names
    assert dir(torchddp) == sorted([*names, *MODULES])
    assert all(hasattr(torchddp, name) for name in names)


def test_modules_are_imported_as_ever() -> None:
    code = f"import torchddp.errors, torchddp.sync\nfor name in {MODULES!r}: __import__(f'torchddp.{{name}}')\n"
    code += "print(torchddp.errors.__name__, torchddp.ddp.__name__, 'errors' in dir(torchddp))"
    assert run(code).split() == ["torchddp.errors", "torchddp.ddp", "False"]


def test_what_a_type_checker_allows_is_what_the_constructor_accepts() -> None:
    for option, choices in {
        "transport": BUILT_IN_TRANSPORTS,
        "zero_weights": options.ZeroWeights,
        "sync": options.SyncChoice,
        "main_grads_as": options.MainGradsAs,
    }.items():
        for value in get_args(choices):
            DDPOptions(**{option: value, "main_grads": torch.float32 if value == "grad" else None})
        with pytest.raises(ValueError, match="'pigeon'"):
            DDPOptions(**{option: "pigeon"})


def test_no_choice_is_missing() -> None:
    assert set(get_args(BUILT_IN_TRANSPORTS)) == {"auto", select.C10D, *select._kinds}
    assert set(get_args(options.SyncChoice)) == {strategy.value for strategy in DDPSyncStrategy}
    assert set(get_args(options.MainGradsAs)) == set(options._PRECISIONS)


def test_an_editable_install_is_a_path_that_type_checkers_follow(tmp_path: Path) -> None:
    project, wheels = tmp_path / "project", tmp_path / "wheels"
    project.mkdir()
    wheels.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (project / name).write_bytes((ROOT / name).read_bytes())
    setup = (ROOT / "setup.py").read_text()
    extension = 'ext_modules=[Extension("torchddp._C", sources=[])],'
    assert extension in setup
    (project / "setup.py").write_text(setup.replace(extension, ""))  # compiling it is no part of the question
    shutil.copytree(ROOT / "cmake", project / "cmake")
    (project / "torchddp").mkdir()
    (project / "torchddp" / "__init__.py").touch()
    run(f"from setuptools import build_meta\nbuild_meta.build_editable({str(wheels)!r})", cwd=project)
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith(".pth")]
        assert archive.read(path).decode().strip() == str(project)
        assert not any(name.endswith("_finder.py") for name in archive.namelist())
    assert (ROOT / "torchddp" / "py.typed").is_file()
