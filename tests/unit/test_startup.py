"""What an installed torchddp has Python do when it starts; the variable itself: test_install.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.startup_site import make_site, python

REGISTRY = """
class Registry(dict):
    def register(self, name, strategy, description, override, **arguments):
        assert override or name not in self
        self[name] = (strategy, description, arguments)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_site(tmp_path_factory.mktemp("site"))


def make_lightning(folder: Path, **strategies: str) -> str:
    """A package with the modules of Lightning that hold its registries; returns the folder."""
    for name in ("fabric", "pytorch"):
        package = folder / "lightning" / name
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "strategies.py").write_text(strategies[name])
    (folder / "lightning" / "__init__.py").write_text("import lightning.fabric, lightning.pytorch\nIMPORTED = 1\n")
    return str(folder)


def test_every_start_costs_one_small_module(site: str) -> None:
    folder = site.partition(os.pathsep)[0]
    code = (
        "import sys, site; before = set(sys.modules); "
        f"site.addsitedir({folder!r}); print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=110)
    assert done.stdout == "__future__ _torchddp_startup\n", done.stdout + done.stderr


def test_a_program_that_looks_for_torch_before_it_imports_it(site: str) -> None:
    code = (
        "import importlib.util as util; assert util.find_spec('torch') and util.find_spec('torch'); import torch; "
        "from torch.nn.parallel import DistributedDataParallel as D; exec('class M(D): pass'); "
        "print(M.__mro__[1].__name__)"
    )
    done = python("-c", code, PYTHONPATH=site, TORCHDDP_INSTALL="1")
    assert done.stdout == "DerivedDDP\n", done.stdout + done.stderr


def test_lightning_knows_the_names_and_torchddp_is_not_imported(site: str, tmp_path: Path) -> None:
    lightning = make_lightning(
        tmp_path, fabric=REGISTRY + "STRATEGY_REGISTRY = Registry()", pytorch=REGISTRY + "StrategyRegistry = Registry()"
    )
    code = (
        "import sys, importlib.util; importlib.util.find_spec('lightning'); import lightning.pytorch.strategies as p; "
        "import lightning, lightning.fabric.strategies as f; print(lightning.IMPORTED, 'torchddp' in sys.modules); "
        "print(len(p.StrategyRegistry), len(f.STRATEGY_REGISTRY), p.StrategyRegistry['torchddp_sharded_fork'][1:]); "
        "print(any('torchddp' in type(finder).__module__ for finder in sys.meta_path))"
    )
    done = python("-c", code, PYTHONPATH=site + os.pathsep + lightning)
    assert done.stdout.splitlines() == [
        "1 False",
        "15 12 (\"torchddp, sharded: start_method='fork'\", {'start_method': 'fork'})",
        "False",
    ], done.stdout + done.stderr


def test_a_lightning_that_has_no_such_registry_is_imported_all_the_same(site: str, tmp_path: Path) -> None:
    lightning = make_lightning(tmp_path, fabric="", pytorch="")
    done = python("-c", "import lightning; print(lightning.IMPORTED)", PYTHONPATH=site + os.pathsep + lightning)
    assert done.stdout == "1\n" and "cannot import name 'STRATEGY_REGISTRY'" in done.stderr


def test_another_package_of_that_name_is_none_of_our_business(site: str, tmp_path: Path) -> None:
    lightning = make_lightning(tmp_path, fabric="", pytorch="")
    (tmp_path / "lightning" / "__init__.py").write_text("print('thunder')")
    done = python("-c", "import lightning", PYTHONPATH=site + os.pathsep + lightning)
    assert done.stdout == "thunder\n" and done.stderr == ""


def test_a_lightning_whose_import_fails_fails_as_without_us(site: str, tmp_path: Path) -> None:
    lightning = make_lightning(tmp_path, fabric="", pytorch="")
    (tmp_path / "lightning" / "__init__.py").write_text("raise ValueError('broken')")
    code = "for _ in range(2):\n  try:\n    import lightning\n  except ValueError as e: print(e)"
    done = python("-c", code, PYTHONPATH=site + os.pathsep + lightning)
    assert done.stdout == "broken\nbroken\n" and done.stderr == ""
