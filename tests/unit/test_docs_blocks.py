"""Code blocks in docs/ and README.md run, or say why they don't.

A block of Python is a complete program. It runs here as `torchrun --nproc-per-node 2` would run it, on as many ranks as
the comment in the line before it says, and prints what the block of text after it shows: the same lines in any order,
numbers within 5%, and whatever a comment before that text lets vary. All comments:

    <!-- ranks: 4 -->
    <!-- varies: \\d+ ms -->
    <!-- fragment -->           runs here on one rank, after the page's fragments before it, with the names from `names`
    <!-- fragment: of a model that isn't here -->         is only compiled, as with the next two
    <!-- runs: tests/fault/test_docs.py -->
    <!-- not run: needs lightning -->

Examples in docstrings run on four ranks. Commands are not run, but torchddp's subcommands and options and the targets
of `make` must exist.
"""

import contextlib
import io
import itertools
import os
import pydoc
import re
import shlex
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import typer.main
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import torchddp
from scripts.docs_hooks import ROOT, blocks, examples
from tests.harness import gathered, run_ranks
from tests.programs import free_port
from torchddp.cli.app import make_app

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = typer.main.get_command(make_app()).commands
SHELL = ("sh", "bash", "console")

pytestmark = pytest.mark.beyond_torch("pages about torchddp")


def name_of(page):
    return str(page.relative_to(ROOT))


def complaint(page, block):
    """What is wrong with a block or its marker; empty if nothing is."""
    kind, what = block.marker or ("", "")
    if not block.fenced or not block.language:
        return "a block must be fenced and name its language"
    if block.language == "python":
        compile(block.code, page.name, "exec")
    if missing := [name for name in re.findall(r"[\w/]+\.py", what) if not (ROOT / name).is_file()]:
        return f"{', '.join(missing)} does not exist"
    if kind or block.language not in SHELL:
        return ""
    return "; ".join(filter(None, map(wrong_with, commands(block.code))))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_runs_or_says_why_not(page):
    found = [(block.start + 1, complaint(page, block)) for block in blocks(page.read_text())]
    assert not [f"{name_of(page)}:{line}: {text}" for line, text in found if text]


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
    if program == "torchddp":
        return wrong_with_ours(rest)
    if program == "make":
        return not_found("target", [word for word in rest if "=" not in word], (ROOT / "Makefile").read_text(), "^{}:")
    if rest[:2] == ["-m", "benchmarks"]:
        return wrong_with_ours(["bench", *rest[2:]])
    return ""


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
        "model": torchddp.DDP(module),
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


def programs(page):
    """The complete programs of a page, each with the block of text after it, or None. Commands may stand between."""
    found = (block for block in blocks(page.read_text()) if block.language not in SHELL)
    for block, after in itertools.pairwise([*found, None]):
        if block.language == "python" and (block.marker or ("ranks", ""))[0] == "ranks":
            shown = after is not None and after.language == "text" and (after.marker or ("varies",))[0] == "varies"
            yield block, after if shown else None


def program_of(rank, world_size, code):
    """What the program prints on a rank under torchrun."""
    port = gathered(free_port())[0]  # as late as possible: a connection may take it
    dist.destroy_process_group()
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank), **address})
    use_eager_compiler()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {"__name__": "__main__"})
    return printed.getvalue()


def use_eager_compiler():
    compiled = torch.compile
    torch.compile = lambda model: compiled(model, backend="eager")


NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+")


def assert_prints(found, promised):
    """The same lines in any order, and numbers with a point within 5%: other processors add in another order."""
    varies = re.compile(promised.marker[1] if promised.marker else "(?!)")
    said, shown = (sorted(varies.sub("*", text).splitlines(), key=without_numbers) for text in (found, promised.code))
    assert [*map(without_numbers, said)] == [*map(without_numbers, shown)], found
    values, wanted = ([float(value) for line in lines for value in NUMBER.findall(line)] for lines in (said, shown))
    assert values == pytest.approx(wanted, rel=0.05, abs=0.02), found


def without_numbers(line):
    return NUMBER.sub("#", line)


@pytest.mark.parametrize("page", [page for page in PAGES if any(programs(page))], ids=name_of)
def test_programs_run_and_print_what_the_page_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block, promised in programs(page):
        where = f"{name_of(page)}:{block.start + 1}"
        print("case:", where)
        world_size = int((block.marker or ("", "2"))[1])
        code = compile("\n" * (block.start + 1) + block.code, name_of(page), "exec")
        printed = "".join(run_ranks(program_of, world_size, world_size, code))
        assert promised or not printed, f"{where}: show what it prints:\n{printed}"
        if promised:
            assert_prints(printed, promised)


def fragments(page):
    python = (block for block in blocks(page.read_text()) if block.language == "python")
    return [block for block in python if block.marker == ("fragment", "")]


@pytest.mark.parametrize("page", [page for page in PAGES if fragments(page)], ids=name_of)
def test_fragments_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def work(rank):
        use_eager_compiler()
        known = names()
        for block in fragments(page):
            known["module"] = fresh_module()
            exec(compile("\n" * (block.start + 1) + block.code, name_of(page), "exec"), known)

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
