"""The comparison of the torch that was built for with the one that runs."""

import subprocess
import sys

import pytest

from torchddp._import_check import check_torch_matches, minor


def test_minor_of_versions():
    assert minor("2.13.0+cpu") == (2, 13)
    assert minor("2.9.1") == (2, 9)
    assert minor("2.15.0a0+git1234") == (2, 15)


def test_same_minor_is_accepted():
    check_torch_matches(built="2.13.0+cpu", running="2.13.1+cu130")


@pytest.mark.parametrize("running", ["2.12.1", "2.14.0+cpu", "3.13.0"])
def test_other_minor_says_what_to_do(running):
    with pytest.raises(
        ImportError, match=rf"built for torch 2\.13\.0\+cpu, but torch {running.replace('+', '.')}.*pip install"
    ):
        check_torch_matches(built="2.13.0+cpu", running=running)


def test_package_import_runs_the_check():
    """A process whose torch claims another version must not get as far as the extension's classes."""
    code = "import torch; torch.__version__ = '2.10.0'; import torchddp"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "but torch 2.10.0 is running" in done.stderr


def test_import_does_not_start_torch_dynamo_or_plots():
    code = "import torch, sys; before = set(sys.modules); import torchddp; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    for heavy in ("torch._dynamo", "torch._inductor", "matplotlib", "rich", "numpy.testing"):
        assert f"'{heavy}'" not in done.stdout


def test_rooms_are_there_without_an_import_of_their_own() -> None:
    code = "import torchddp; print(torchddp.profiler.profile.__name__, torchddp.optim.OSS.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["profile", "OSS"], done.stderr
