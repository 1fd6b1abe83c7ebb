"""The checks behind Makefile targets, GitHub's workflows, and the index that pip installs wheels from."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from scripts.build_index import main
from scripts.build_wheel import PLATFORM, minor_version, variant_name
from tests.programs import ROOT
from torchddp._import_check import wheel_advice

tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def wheel_jobs() -> list[dict[str, str]]:
    """Expand the matrix as GitHub does: an entry of `include` extends the combinations it matches."""
    matrix = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["wheel"]["strategy"]["matrix"]
    names = ("torch", "device", "python")
    jobs = [dict(zip(names, values, strict=True)) for values in itertools.product(*(matrix[name] for name in names))]
    jobs = [job for job in jobs if not any(rule.items() <= job.items() for rule in matrix["exclude"])]
    for job in jobs:
        for extra in matrix["include"]:
            if all(job.get(name, value) == value for name, value in extra.items() if name in names):
                job |= extra
    return jobs


def test_a_release_has_the_ten_wheels_that_the_docs_list() -> None:
    """Each row of the first table of docs/install.md, with the command that installs its wheel."""
    page = (ROOT / "docs" / "install.md").read_text()
    row = r"^\| (\S+) \| (\S+).* \| (\S+) \| `pip install --no-deps RELEASE/torchddp-(\S+)-(\S+)-(\S+)-(\S+)\.whl` \|$"
    rows = re.findall(row, page, re.MULTILINE)
    version = PROJECT["tool"]["torchddp"]["version"]
    expected = set()
    for job in wheel_jobs():
        tag = f"cp{job['python'].replace('.', '')}"
        device = "CPU" if job["variant"] == "cpu" else "CUDA"
        name = f"{version}+{job['variant']}.torch{job['torch']}"
        expected.add((job["torch"], device, job["python"], name, tag, tag, "manylinux_2_28_x86_64"))
    assert set(rows) == expected and len(rows) == 10


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


def test_dependency_groups_are_pinned() -> None:
    for name, requirements in PROJECT["dependency-groups"].items():
        for requirement in requirements:
            if isinstance(requirement, dict):
                assert requirement.keys() == {"include-group"}, name
            else:
                assert re.fullmatch(r"[\w.-]+(\[\w+\])?={2,3}[\w.]+", requirement), (name, requirement)


TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
VERSIONS = ("0.1.0+cpu.torch2.13", "0.1.0+cu130.torch2.13", "0.1.0+cu126.torch2.12")


def write_wheel(folder: Path, version: str, tag: str = TAG, plat: str = PLATFORM, said_version: str = "") -> Path:
    """Write a wheel that pip can install, with a module that has its version."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"torchddp-{version}-{tag}-{tag}-{plat}.whl"
    info = f"torchddp-{version}.dist-info"
    metadata = f"Metadata-Version: 2.4\nName: torchddp\nVersion: {said_version or version}\nRequires-Python: >=3.10\n"
    files = {
        "torchddp/__init__.py": f"__version__ = '{version}'\n",
        f"{info}/METADATA": metadata + "Requires-Dist: torch==2.13.*\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}-{tag}-{plat}\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of wheels for several torch versions, this Python and another."""
    folder = tmp_path_factory.mktemp("index")
    for version in VERSIONS:
        write_wheel(folder / "dist" / version, version)
        write_wheel(folder / "dist" / "other", version, tag="cp310" if TAG != "cp310" else "cp311")
        write_wheel(folder / "dist" / "other", version, plat="manylinux_2_28_riscv64")
    main([str(folder / "dist"), "--out", str(folder / "site"), "--url", "https://example.org/wheels/"])
    return folder / "site"


def pip_install(index_url: str, target: Path, requirement: str) -> subprocess.CompletedProcess[str]:
    """Install from `index_url` only, whatever pip's configuration."""
    env = {name: value for name, value in os.environ.items() if not name.upper().startswith("PIP_")}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "no_proxy": "*", "PIP_RETRIES": "0"}
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-cache-dir", "--target", str(target)]
    command += ["--index-url", index_url, requirement]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def test_pip_installs_the_advised_wheel_and_refuses_a_changed_one(index: Path, tmp_path: Path) -> None:
    advice = wheel_advice("0.1.0+cpu.torch2.13", {"torch": "2.13.1+cu130", "cuda": "13.0"})
    named = re.search(r"--no-deps (\S+) --index-url INDEX/(\S+) ", advice)
    assert named is not None
    assert named[1].endswith(f"+{variant_name('13.0')}.torch{minor_version('2.13.1+cu130')}")  # as built
    site = tmp_path / "site"
    shutil.copytree(index, site)
    done = pip_install(f"{site.as_uri()}/{named[2]}", tmp_path / "target", requirement=named[1])
    assert done.returncode == 0, done.stderr
    assert VERSIONS[1] in (tmp_path / "target" / "torchddp" / "__init__.py").read_text()
    for wheel in (site / "wheels").iterdir():
        wheel.write_bytes(wheel.read_bytes() + b"\0")
    done = pip_install(f"{site.as_uri()}/{named[2]}", tmp_path / "other", requirement=named[1])
    assert done.returncode == 1 and "HASHES" in done.stderr
