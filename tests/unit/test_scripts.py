"""The checks behind Makefile targets and GitHub's workflows, and the wheel that is put together from others."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.build_wheel import PLATFORM
from scripts.check_wheel import TO_COMPILE
from scripts.join_wheels import join, joined_problems
from scripts.lock import ENVIRONMENTS
from scripts.torch_wheels import PYTHON_TAG
from tests.programs import ROOT
from torchddp._extension import SUFFIX

tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_and_pip_are_pinned_and_scripts_and_groups_exist(path: Path) -> None:
    text = path.read_text()
    uses = re.findall(r"uses: (\S+)", text)
    assert uses and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in uses), uses
    for module in re.findall(r"-m (scripts\.\w+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
    assert set(re.findall(r"--group (\S+)", text)) <= PROJECT["dependency-groups"].keys()
    (pinned,) = re.findall(r"^PIP := (pip==\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"pip==\S+", text)) <= {pinned}


def versions_of(group: str) -> dict[str, str]:
    """By package's name, the version that a dependency group and those that it includes pin."""
    pinned: dict[str, str] = {}
    for requirement in PROJECT["dependency-groups"][group]:
        if isinstance(requirement, dict):
            pinned |= versions_of(requirement["include-group"])
        else:
            named = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?={2,3}([\w.]+)", requirement)
            assert named is not None, (group, requirement)
            pinned[named[1].lower().replace("_", "-")] = named[2]
    return pinned


@pytest.mark.parametrize("group", ENVIRONMENTS)
def test_locked_versions_are_those_that_the_project_asks_for(group: str) -> None:
    _, *lines = (ROOT / "requirements" / f"{group}.txt").read_text().splitlines()
    locked = dict(line.split("==") for line in lines)
    assert versions_of(group).items() <= locked.items()


def write_part(folder: Path, torch: str, kind: str, **changes: str) -> Path:
    """A wheel of one torch, as scripts/build_wheel.py makes it, whose extension is a text file."""
    info = f"torchddp-0.2.0+{kind}.torch{torch}.dist-info"
    metadata = f"Metadata-Version: 2.4\nName: torchddp\nVersion: 0.2.0+{kind}.torch{torch}\nProvides-Extra: cli\n"
    files = {f"torchddp/{name}": name for name in ("__init__.py", "py.typed", "_C.pyi", "cli/__init__.py")}
    files |= {f"torchddp/_source/{name}": name for name in TO_COMPILE}
    files |= {
        f"torchddp/_C-torch{torch}-{kind}{SUFFIX}": f"for torch {torch} {kind}",
        f"{info}/METADATA": metadata + f"Requires-Dist: torch=={torch}.*\nRequires-Dist: rich; extra == 'cli'\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {PYTHON_TAG}-{PYTHON_TAG}-{PLATFORM}\n",
        f"{info}/licenses/LICENSE": "",
        f"{info}/RECORD": "",
    }
    path = folder / f"{info.removesuffix('.dist-info')}-{PYTHON_TAG}-{PYTHON_TAG}-{PLATFORM}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (files | changes).items():
            archive.writestr(name, text)
    return path


def test_one_wheel_is_put_together_from_those_of_several_torches(tmp_path: Path) -> None:
    covered = [("2.13", "cpu"), ("2.14", "cpu"), ("2.14", "cu130")]
    wheel = join([write_part(tmp_path, *each) for each in covered], tmp_path / "dist")
    assert wheel.name == f"torchddp-0.2.0-{PYTHON_TAG}-{PYTHON_TAG}-{PLATFORM}.whl"
    assert joined_problems(wheel, 3) == [] and joined_problems(wheel, 4) == ["4 parts, but 3 extensions"]
    target = tmp_path / "target"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, str(wheel)], check=True, timeout=300)
    for torch, kind in covered:
        assert (target / "torchddp" / f"_C-torch{torch}-{kind}{SUFFIX}").read_text() == f"for torch {torch} {kind}"
    text = (target / "torchddp-0.2.0.dist-info" / "METADATA").read_text()
    assert "\nVersion: 0.2.0\n" in text and "\nRequires-Dist: torch>=2.11\nRequires-Dist: rich; extra" in text
