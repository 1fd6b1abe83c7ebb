"""The GitHub workflows: which wheels are built, and that what they run is pinned and exists."""

import fnmatch
import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import build_index
from scripts.check_compat import TORCHES

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

# Wheels of torch on download.pytorch.org, of those we build for (2.11 and 2.12 also have CUDA 12.9).
PUBLISHED = {
    "2.11": {"cpu", "cu126", "cu128", "cu130"},
    "2.12": {"cpu", "cu126", "cu130", "cu132"},
    "2.13": {"cpu", "cu126", "cu130", "cu132"},
    "2.14": {"cpu", "cu126", "cu130", "cu132"},
    "2.15": {"cpu", "cu130", "cu132"},
}
FOR_AARCH64 = {"cpu", "cu130"}  # of those
OLDEST_PYTHON = {"2.15": "3.11"}  # all others: 3.10
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())


def key(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def matrix() -> dict[str, Any]:
    return load("wheels.yml")["jobs"]["wheel"]["strategy"]["matrix"]


def combinations() -> set[tuple[str, ...]]:
    """(python, torch, variant, machine) as GitHub expands the matrix."""
    spec = matrix()
    names = ("python", "torch", "variant", "machine")
    jobs = [dict(zip(names, job, strict=True)) for job in itertools.product(*(spec[name] for name in names))]
    return {
        tuple(job.values())
        for job in jobs
        if not any(all(job[name] == value for name, value in rule.items()) for rule in spec["exclude"])
    }


def supported_torches() -> list[str]:
    """Minor versions in the range that a source installation allows."""
    found = re.search(r'^torch-range = ">=2\.(\d+),<2\.(\d+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return [f"2.{minor}" for minor in range(int(found[1]), int(found[2]))]


def test_a_wheel_for_all_that_torch_publishes_and_nothing_else() -> None:
    expected = {
        (python, torch, variant, machine)
        for torch, variants in PUBLISHED.items()
        for machine, built in (("x86_64", variants), ("aarch64", variants & FOR_AARCH64))
        for variant in built
        for python in PYTHONS
        if key(python) >= key(OLDEST_PYTHON.get(torch, PYTHONS[0]))
    }
    assert combinations() == expected


def test_the_matrix_covers_the_supported_range() -> None:
    assert matrix()["torch"] == supported_torches() == list(PUBLISHED)
    requires = re.search(r'^requires-python = ">=([\d.]+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert requires is not None and requires[1] == PYTHONS[0] == matrix()["python"][0]


def test_compat_checks_the_ends_of_the_range() -> None:
    assert [version.rpartition(".")[0] for version in TORCHES] == [supported_torches()[0], supported_torches()[-1]]


def test_every_exclusion_excludes_something() -> None:
    spec = matrix()
    for rule in spec["exclude"]:
        assert all(value in spec[name] for name, value in rule.items()), rule
        if "machine" in rule:
            assert rule["machine"] == "aarch64" and rule["variant"] not in FOR_AARCH64, rule
        else:
            assert "python" in rule or rule["variant"] not in PUBLISHED[rule["torch"]], rule


def test_every_variant_has_an_image_with_its_nvcc() -> None:
    spec = matrix()
    images = {(rule["variant"], rule["machine"]): rule["image"] for rule in spec["include"]}
    assert images.keys() == {job[2:] for job in combinations()} and len(images) == len(spec["include"])
    for (variant, machine), image in images.items():
        assert "manylinux2_28" in image or "manylinux_2_28" in image or "manylinuxaarch64" in image
        assert variant == "cpu" or f":cuda{variant[2:4]}.{variant[4:]}-" in image
        assert ("aarch64" in image) is (machine == "aarch64")


def test_a_tag_publishes_the_wheels_that_were_built() -> None:
    jobs = load("wheels.yml")["jobs"]
    publish = jobs["publish"]
    assert publish["needs"] == "wheel" and "refs/tags/v" in publish["if"]  # after all of them: a failed one stops it
    steps = {step.get("uses", step.get("run", "")).partition("@")[0]: step for step in publish["steps"]}
    (upload,) = [step for step in jobs["wheel"]["steps"] if "upload-artifact" in step.get("uses", "")]
    download = steps["actions/download-artifact"]["with"]
    assert fnmatch.fnmatch(upload["with"]["name"], download["pattern"])
    assert all(f"matrix.{name} }}" in upload["with"]["name"] for name in ("python", "torch", "variant", "machine"))
    (command,) = [step["run"] for step in publish["steps"] if "scripts.build_index" in step.get("run", "")]
    args = build_index.parse_args(shlex.split(command.partition("scripts.build_index ")[2]))
    assert (str(args.wheels), str(args.out)) == (
        download["path"],
        steps["actions/upload-pages-artifact"]["with"]["path"],
    )
    assert {"pages": "write", "id-token": "write"}.items() <= publish["permissions"].items()
    assert "actions/deploy-pages" in steps


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned(path: Path) -> None:
    uses = re.findall(r"uses: (\S+)", path.read_text())
    assert uses and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in uses), uses


def test_ci_runs_targets_of_the_makefile() -> None:
    targets = load("ci.yml")["jobs"]["check"]["strategy"]["matrix"]["target"]
    makefile = (ROOT / "Makefile").read_text()
    assert {"lint", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_scripts_and_requirements_that_are_run_exist(path: Path) -> None:
    text = path.read_text()
    for module in re.findall(r"-m (scripts\.\w+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
    for requirements in re.findall(r"requirements/\w+\.txt", text):
        assert (ROOT / requirements).is_file(), requirements
