"""docs/ name everything public and only what exists: names, commands, variables, results, migration."""

import ast
import inspect
import json
import re
import subprocess

import pytest

import torchddp
from benchmarks import pages
from scripts import write_command_page
from scripts.docs_hooks import ROOT
from tests.pages import spans
from torchddp.cli import checks

DOCS = ROOT / "docs"
PUBLIC = """averaging comm_hooks composable fault_tolerance integrations/accelerate integrations/lightning optim
    parallel profiler sync""".split()

pytestmark = pytest.mark.beyond_torch("pages about torchddp")


def public_names(package):
    """`__all__` of a package, read from its source, because some packages need what is not installed here."""
    folder = ROOT / "torchddp" / package
    source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"{source} has no __all__")


def documented(page, module):
    return set(re.findall(rf"^::: {re.escape(module)}\.(\w+)$", page.read_text(), re.MULTILINE))


@pytest.mark.parametrize("package", ["", *PUBLIC])
def test_every_public_name_has_its_docstring_in_the_reference(package):
    elsewhere = public_names("") if package else {"DDP", "__version__"}  # an alias of a class; a string
    module = f"torchddp.{package.replace('/', '.')}" if package else "torchddp"
    assert documented(DOCS / "reference/index.md", module) == public_names(package) - elsewhere


def test_every_argument_has_its_default_and_its_cost():
    page = (DOCS / "reference/arguments.md").read_text()
    found = {}
    for section in page.split("\n## ")[1:]:
        for row in re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE):
            kind, default, does, costs = row[1].split(" | ")
            assert kind and does and costs, row
            found.setdefault(section.split("\n")[0], []).append((row[0], default))
    for given, of in (
        (found["torch's"] + found["torchddp's own"], torchddp.DDP),
        (found["Precision"], torchddp.Precision),
        (found["Checks"], torchddp.Checks),
    ):
        wanted = inspect.signature(of).parameters.values()
        defaults = [(name, None if text == "required" else ast.literal_eval(spans(text)[0])) for name, text in given]
        assert defaults == [(one.name, None if one.default is one.empty else one.default) for one in wanted], of


def test_the_command_page_matches_the_commands_help():
    if write_command_page.PAGE.read_text() != write_command_page.page():
        pytest.fail("docs/reference/command.md is not what the command says: run python -m scripts.write_command_page")


def test_the_tables_match_the_results():
    text = "".join(page.read_text() for page in pages.PAGES)
    if text != pages.filled(text):
        pytest.fail("docs/ is not what the results say: run python -m benchmarks.pages")
    assert set(re.findall(r"<!-- table: (\w+) -->", text)) == pages.TABLES.keys()


def variables(heading):
    section = write_command_page.PAGE.read_text().split(f"### {heading}\n")[1].split("\n### ")[0]
    return set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE))


def variables_in(*patterns):
    """Variables that code in tracked files reads."""
    pattern = r"(getenv\(|environ.*|_ENV = |^    )\"?TORCHDDP_[A-Z_]+\""
    grep = ["git", "-C", str(ROOT), "grep", "-hoE", pattern, "--", *patterns]
    found = subprocess.run(grep, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"TORCHDDP_[A-Z_]*[A-Z]", found))


def test_every_environment_variable_has_a_row():
    assert variables("Read while training") == checks.READ_WHILE_TRAINING
    build = (ROOT / "setup.py").read_text() + (ROOT / "cmake" / "driver.py").read_text()
    switches = set(re.findall(r'"(TORCHDDP_\w+)"', build))
    assert (
        variables("Read while building") - {"CUDACXX", "CUDA_HOME", "MAX_JOBS"} == switches >= checks.READ_BY_THE_BUILD
    )
    assert variables("Read by tests and benchmarks") == checks.READ_BY_TESTS_AND_BENCHMARKS
    everywhere = variables("Read while training") | variables("Read by tests and benchmarks")
    assert variables_in("torchddp", "csrc") <= everywhere
    assert variables("Read by tests and benchmarks") <= variables_in("torchddp", "tests", "scripts", "benchmarks")


RESULTS = ROOT / "benchmarks" / "results"


def test_the_readmes_table_shows_the_newest_result():
    result = json.loads(max(RESULTS.glob("*-exposed-*.json")).read_text())
    readme = (pages.DOCS.parent / "README.md").read_text()
    for model in result["results"]:
        rows = {row["name"]: row for row in model["variants"]}
        best, mine = rows[model["best_torch"]], rows[pages.OURS]
        added = (f"{pages.number(row['cost'][1])} ms" for row in (best, mine))
        step = f"{mine['step_ms'][1] / best['step_ms'][1]:.2f}"
        assert f"| {' | '.join((model['title'], *added, pages.spread(mine['ratio_to_best_torch']), step))} |" in readme
    assert f"docs/images/{pages.CHART.name}" in readme and pages.CHART.exists()
