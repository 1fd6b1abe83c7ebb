"""GitHub workflows and issue forms: wheels built and published, pinned actions, existing scripts."""

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
from tests.programs import ROOT

tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())


def wheel_jobs() -> list[dict[str, str]]:
    """Expand the matrix as GitHub does: an entry of `include` extends the combinations it matches."""
    matrix = load("release.yml")["jobs"]["wheel"]["strategy"]["matrix"]
    names = ("torch", "device", "python")
    jobs = [dict(zip(names, values, strict=True)) for values in itertools.product(*(matrix[name] for name in names))]
    jobs = [job for job in jobs if not any(rule.items() <= job.items() for rule in matrix["exclude"])]
    for job in jobs:
        for extra in matrix["include"]:
            if all(job.get(name, value) == value for name, value in extra.items() if name in names):
                job |= extra
    return jobs


def torch_range() -> tuple[str, str]:
    """The oldest and the newest minor version that a build from source allows."""
    found = re.fullmatch(r">=2\.(\d+),<2\.(\d+)", PROJECT["tool"]["torchddp"]["torch-range"])
    assert found is not None
    return f"2.{found[1]}", f"2.{int(found[2]) - 1}"


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


def test_wheels_are_built_for_supported_versions() -> None:
    torches = {job["torch"] for job in wheel_jobs()}
    pinned = PROJECT["dependency-groups"]["torch"][0].removeprefix("torch==").rpartition(".")[0]
    assert torches == {pinned, torch_range()[1]}  # the tested version and the newest
    named = {line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if "Python :: 3." in line}
    assert {job["python"] for job in wheel_jobs()} < named
    assert f">={min(named, key=lambda version: int(version[2:]))}" == PROJECT["project"]["requires-python"]
    # `make compat` checks the ends of the range.
    assert [version.rpartition(".")[0] for version in TORCHES] == list(torch_range())
    # Each job's image has the matching nvcc.
    for job in wheel_jobs():
        assert "manylinux2_28" in job["image"] or "manylinux_2_28" in job["image"], job
        variant = job["variant"]
        assert variant == "cpu" or f":cuda{variant[2:4]}.{variant[4:]}-" in job["image"], job


def test_a_tag_publishes_the_built_wheels_and_an_index() -> None:
    jobs = load("release.yml")["jobs"]
    publish = jobs["publish"]
    assert publish["needs"] == "wheel" and "refs/tags/v" in publish["if"]  # runs only if all of them succeeded
    (upload,) = [step for step in jobs["wheel"]["steps"] if "upload-artifact" in step.get("uses", "")]
    (download,) = [step["with"] for step in publish["steps"] if "download-artifact" in step.get("uses", "")]
    assert fnmatch.fnmatch(upload["with"]["name"], download["pattern"]) and download["merge-multiple"]
    assert all(f"matrix.{name} }}" in upload["with"]["name"] for name in ("torch", "variant", "python"))
    commands = [step["run"] for step in publish["steps"] if "run" in step]
    args = build_index.parse_args(shlex.split(commands[0].partition("scripts.build_index ")[2]))
    archive = f"{args.out}.tar.gz"
    assert str(args.wheels) == download["path"] and commands[1] == f"tar -czf {archive} {args.out}"
    assert commands[2].startswith("gh release create ") and commands[2].endswith(f" {args.wheels}/*.whl {archive}")
    assert publish["permissions"] == {"contents": "write"}


def test_the_built_docs_are_published_with_the_wheel_index() -> None:
    jobs = load("docs.yml")["jobs"]
    steps = jobs["build"]["steps"]
    (site,) = re.findall(r"^site_dir: (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    (upload,) = [step for step in steps if "upload-pages-artifact" in step.get("uses", "")]
    assert upload["with"]["path"] == site and any(step.get("run", "").startswith("make docs") for step in steps)
    (index,) = [step["run"] for step in steps if "build_index" in step.get("run", "")]
    args = build_index.parse_args(shlex.split(index.partition("scripts.build_index ")[2]))
    assert str(args.out) == f"{site}/wheels" and f"--dir {args.wheels}" in index
    publish = jobs["publish"]
    assert publish["needs"] == "build" and "refs/heads/main" in publish["if"]
    assert any("deploy-pages" in step["uses"] for step in publish["steps"])


def test_issue_forms_are_valid_and_have_required_fields() -> None:
    """The ids and labels of a form's fields are unique, as GitHub requires."""
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert [path.stem for path in forms] == ["bug", "feature", "performance"]
    for path in forms:
        form = yaml.safe_load(path.read_text())
        assert form["name"] and form["description"], path
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len({field["attributes"]["label"] for field in fields}) > 1
        required = {field["id"] for field in fields if field.get("validations", {}).get("required")}
        assert required == {field["id"] for field in fields} - {"wanted"}, path


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
