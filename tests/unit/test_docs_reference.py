"""The reference in docs/ is complete: public names, commands, environment variables, result tables, docstrings."""

import ast
import re
import subprocess

import pytest

from benchmarks import pages
from scripts import write_command_page
from scripts.docs_hooks import ROOT, as_markdown
from torchddp.cli import checks

DOCS = ROOT / "docs"
PUBLIC = """averaging comm_hooks composable fault_tolerance integrations/accelerate integrations/lightning optim
    parallel profiler sync""".split()
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

pytestmark = pytest.mark.beyond_torch("pages about torchddp")


def public_names(package):
    """`__all__` of a package, read from its source, because some packages need what is not installed here."""
    source = (ROOT / "torchddp" / package / "__init__.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"torchddp/{package}/__init__.py has no __all__")


def documented(page, module):
    return set(re.findall(rf"^::: {re.escape(module)}\.(\w+)$", page.read_text(), re.MULTILINE))


@pytest.mark.parametrize("package", ["", *PUBLIC])
def test_every_public_name_has_its_docstring_on_a_page(package):
    page = DOCS / "reference" / f"{package.partition('/')[0] or 'torchddp'}.md"
    elsewhere = {"DDP", "__version__"} if not package else set()  # an alias of a class; a string
    module = f"torchddp.{package.replace('/', '.')}" if package else "torchddp"
    assert documented(page, module) == public_names(package) - elsewhere
    assert all(name in page.read_text() for name in elsewhere - {"__version__"})


def test_the_command_page_matches_the_commands_help():
    if (DOCS / "command.md").read_text() != write_command_page.page():
        pytest.fail("docs/command.md is not what the command says: run python -m scripts.write_command_page")


def test_the_tables_match_the_results():
    page = (DOCS / "performance.md").read_text()
    if page != pages.filled(page):
        pytest.fail("docs/performance.md is not what the results say: run python -m benchmarks.pages")
    assert set(re.findall(r"<!-- table: (\w+) -->", page)) == pages.TABLES.keys()


def rows(heading):
    section = (DOCS / "environment.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE))


def named_in(*patterns):
    """Variables that code in tracked files reads."""
    pattern = r"(getenv\(|environ.*|_ENV = |^    )\"?TORCHDDP_[A-Z_]+\""
    grep = ["git", "-C", str(ROOT), "grep", "-hoE", pattern, "--", *patterns]
    found = subprocess.run(grep, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"TORCHDDP_[A-Z_]*[A-Z]", found))


def test_every_environment_variable_has_a_row():
    assert rows("Read while training") == checks.READ_WHILE_TRAINING
    switches = set(re.findall(r'(?<!get)\("(TORCHDDP_\w+)"', (ROOT / "setup.py").read_text()))
    assert rows("Read while building") - {"MAX_JOBS"} == switches >= checks.READ_BY_THE_BUILD
    assert rows("Read by tests and benchmarks") == checks.READ_BY_TESTS_AND_BENCHMARKS
    everywhere = rows("Read while training") | rows("Read by tests and benchmarks")
    assert named_in("torchddp", "csrc") <= everywhere
    assert rows("Read by tests and benchmarks") <= named_in("torchddp", "tests", "scripts", "benchmarks")
    reads = r'(?:environ(?:\.get)?[(\[]|ENV = )"([A-Z_]+)"'
    files = [*(ROOT / "torchddp").rglob("*.py"), ROOT / "setup.py"]
    found = {name for path in files for name in re.findall(reads, path.read_text())}
    page = (DOCS / "environment.md").read_text()
    assert len(found) > 15 and not {name for name in found if f"`{name}`" not in page}


def test_docstrings_become_markdown():
    text = "See :class:`~torchddp.DDP` and ``docs/main_grads.md``.\n\n::\n\n    code()\n"
    assert as_markdown(text) == "See `torchddp.DDP` and [main grads](../main_grads.md).\n\n    code()\n"


def test_sections_of_docstrings_are_lists_of_names():
    """mkdocstrings drops an item without a colon in its first line, and merges two items in one line."""
    found = []
    for path in sorted((ROOT / "torchddp").rglob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, DOCUMENTED)]
        text = "\n\n".join(ast.get_docstring(node) or "" for node in nodes)
        for section in re.findall(r"^(?:Args|Raises):\n((?:(?: {4}.*)?\n)+)", text + "\n", re.MULTILINE):
            for item in re.findall(r"^ {4}(\S.*(?:\n {8}.*)*)", section, re.MULTILINE):
                named = re.match(r"(?!None:)(\*{0,2}\w+(, |(?=:)))+: ", item)
                if not named or re.search(r"\. \w+Error: ", item):
                    found.append(f"{path.relative_to(ROOT)}: {item}")
    assert not found
