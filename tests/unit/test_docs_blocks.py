"""Code blocks in docs/ and README.md run, or say why they don't.

A comment in the line before a block names the test that runs it, or says why none does:

    <!-- runs: tests/distributed/test_averaging_diloco.py -->
    <!-- not run: needs a GPU -->

Python without such a comment runs here on one rank: all blocks of a page in turn, with the names from `names`.
So do the examples in docstrings, on four ranks. Commands are not run, but their subcommands, options, targets, modules
and extras must exist.
"""

import importlib.util
import pydoc
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import typer.main
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.run import get_args_parser

import torchddp
from scripts.docs_hooks import ROOT, blocks, examples
from tests.harness import run_ranks
from torchddp.cli.app import app

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = typer.main.get_command(app).commands
SHELL = ("sh", "bash", "console")

pytestmark = pytest.mark.beyond_torch("pages about torchddp")


def name_of(page):
    return str(page.relative_to(ROOT))


def complaint(page, block):
    """What is wrong with a block's marker, or that it is missing; empty if nothing is wrong."""
    if block.marker is None:
        if block.language in SHELL:
            return "; ".join(filter(None, map(wrong_with, commands(block.code))))
        return "" if block.language == "python" else f"a block of {block.language or 'no language'} needs a marker"
    kind, what = block.marker
    if missing := [name for name in re.findall(r"[\w/]+\.py", what) if not (ROOT / name).is_file()]:
        return f"{', '.join(missing)} does not exist"
    if kind == "not run":
        return ""
    test = ROOT / what
    return "" if any(page.name in source for source in sources_of(test)) else f"{what} does not read {page.name}"


def sources_of(test):
    """The source of a test, and of the modules in tests/ that it imports or starts."""
    text = test.read_text()
    yield text
    for module in set(re.findall(r"\btests\.[\w.]+", text)):
        if (path := ROOT / f"{module.replace('.', '/')}.py").is_file():
            yield path.read_text()
    for name in set(re.findall(r"\b(\w+\.py)\b", text)):
        if (path := test.parent / name).is_file():
            yield path.read_text()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_runs_or_says_why_not(page):
    found = [(block.start + 1, complaint(page, block)) for block in blocks(page.read_text())]
    assert not [f"{name_of(page)}:{line}: {text}" for line, text in found if text]


def test_wrong_markers_and_commands_are_found():
    for text, wrong in (
        ("```python\n1 / 0\n```", ""),  # run below
        ("    pip install 'torchddp[cli]'\n    torchddp tune --model mlp   # comment", ""),
        ("```text\nrank 1 died\n```", "needs a marker"),
        ("<!-- not run: what it prints -->\n\n    rank 1 died", ""),
        ("<!-- runs: tests/unit/test_docs_blocks.py -->\n```python\n1\n```", "does not read no_such_"),
        ("<!-- not run: tests/unit/no_such_test.py does -->\n```text\n1\n```", "does not exist"),
        ("```sh\ntorchrun --nproc-per-node 2 -m torchddp trace --nothing\n```", "no option --nothing"),
        ("```sh\nmake no-such-target\n```", "no target no-such-target"),
        ("```sh\npython -m tests.fuzz --no-such-option\n```", "no option --no-such-option"),
        ("```sh\nrm -r build\n```", "can't be checked"),
    ):
        page = Path("no_such_" + "page.md")
        found = "; ".join(filter(None, (complaint(page, block) for block in blocks(text))))
        assert wrong in found if wrong else not found, (text, found)


def commands(code):
    """The words of each command, without comments and text after two spaces."""
    for line in code.replace("\\\n", "").splitlines():
        for part in re.split(r"\s{2,}(?![-\\])", line.strip())[0].split(" && "):
            words = shlex.split(part, comments=True)
            while words and (re.fullmatch(r"\w+=.*", words[0]) or words[0] in ("sudo", "$")):
                words = words[1:]
            if words:
                yield words


def wrong_with(words):
    program, *rest = words
    if program == "torchrun":
        given = get_args_parser().parse_args(rest)
        if not given.module:
            return ""
        program, rest = "python", ["-m", given.training_script, *given.training_script_args]
    if program == "torchddp":
        return wrong_with_ours(rest)
    if program == "make":
        return not_found("target", [word for word in rest if "=" not in word], (ROOT / "Makefile").read_text(), "^{}:")
    if program == "pip":
        extras = re.search(r"optional-dependencies\]\n(.*?)\n\n", (ROOT / "pyproject.toml").read_text(), re.DOTALL)[1]
        named = [name for word in rest for found in re.findall(r"torchddp\[(.*)\]", word) for name in found.split(",")]
        return not_found("extra", named, extras, "^{} = ")
    if Path(program).name == "python" and rest[:1] == ["-m"]:
        return wrong_with_module(rest[1], rest[2:])
    if (ROOT / program).is_file():
        return not_found("option", options_in(rest), (ROOT / program).read_text())
    return f"`{' '.join(words)}` can't be checked: it needs a marker"


def not_found(what, names, text, pattern="{}"):
    return "; ".join(f"no {what} {name}" for name in names if not re.search(pattern.format(name), text, re.MULTILINE))


def options_in(words):
    return [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]


def wrong_with_ours(words):
    if not words or words[0].startswith("-"):
        return ""
    if words[0] not in COMMANDS:
        return f"no command {words[0]}"
    known = [name for one in COMMANDS[words[0]].params for name in (*one.opts, *one.secondary_opts)]
    return not_found("option", options_in(words), "\n".join([*known, "--help"]), "^{}$")


def wrong_with_module(module, words):
    if module in ("torchddp", "benchmarks"):
        return wrong_with_ours(["bench", *words] if module == "benchmarks" else words)
    if module == "torchddp.run":
        return ""  # the program's own options follow
    spec = importlib.util.find_spec(module) if module.partition(".")[0] in ("benchmarks", "scripts", "tests") else None
    if spec is None:
        return f"no module {module}"
    files = Path(spec.origin).parent.rglob("*.py") if spec.submodule_search_locations else [Path(spec.origin)]
    text = "".join(file.read_text() for file in files)
    # A function argument of this name also counts: typer makes an option of it.
    text += "".join(f"--{name.replace('_', '-')}\n" for name in re.findall(r"\b(\w+):", text))
    return not_found("option", options_in(words), text)


def fresh_module():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))


def names():
    """Names that a block may use without defining them."""
    batches = [torch.randn(4, 8) for _ in range(3)]
    module = fresh_module()

    def train(model=None, steps=2):
        model = model or torchddp.DDP(fresh_module())
        for step in range(steps):
            model(batches[step % 3]).square().mean().backward()

    return {
        **{"torch": torch, "dist": dist, "torchddp": torchddp, "DDP": torchddp.DDP},
        "bf16_compress_hook": bf16_compress_hook,
        "model": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.01),
        **dict.fromkeys(("x", "batch"), batches[0]),
        **dict.fromkeys(("batches", "loader", "microbatches"), batches),
        "steps": [batches, batches],
        "loss_of": lambda output: output.square().mean(),
        "train": train,
        "rank": 0,
        "path": "saved.pt",
        "wandb": SimpleNamespace(log=lambda values, step: None),
    }


def run_here(page):
    return [block for block in blocks(page.read_text()) if block.language == "python" and block.marker is None]


@pytest.mark.parametrize("page", [page for page in PAGES if run_here(page)], ids=name_of)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def work(rank):
        compiled = torch.compile
        torch.compile = lambda model: compiled(model, backend="eager")
        known = names()
        for block in run_here(page):
            known["module"] = fresh_module()
            code = compile("\n" * (block.start + block.fenced) + block.code, name_of(page), "exec")
            exec(code, known)

    run_ranks(work, 1)


def test_examples_in_docstrings_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pages = "".join(page.read_text() for page in sorted((ROOT / "docs/reference").glob("*.md")))

    def work(rank):
        for name in re.findall(r"^::: (torchddp\.(?!fault_tolerance|integrations)\S+)", pages, re.MULTILINE):
            for block in examples(pydoc.locate(name)):
                known = {**names(), "module": fresh_module(), "model": torchddp.DDP(fresh_module())}
                exec(compile(block.code, name, "exec"), known)

    run_ranks(work, 4)
