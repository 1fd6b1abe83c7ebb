"""The pages of docs/: their code; docs/migration.md taken apart."""

import re
import signal
from pathlib import Path

from scripts.docs_hooks import blocks

DOCS = Path(__file__).parents[1] / "docs"


def blocks_of(page: str, section: str | None = None, language: str = "python") -> list[str]:
    """The code below a heading of any level, up to the next heading; by default that before the page's sections."""
    text = (DOCS / page).read_text()
    lines, code = text.split("\n"), list(blocks(text))
    inside = {line for block in code for line in range(block.start, block.end)}
    marks = [i for i, line in enumerate(lines) if re.match("#{2,4} ", line) and i not in inside] + [len(lines)]
    start = next(i for i in marks if lines[i].lstrip("# ") == section) if section else 0
    end = next(i for i in marks if i > start)
    return [block.code for block in code if block.language == language and start <= block.start < end]


def code_of(page: str, section: str | None = None) -> str:
    """The Python of a section, as one program."""
    return "\n".join(blocks_of(page, section))


def sections() -> dict[str, str]:
    """Of migration.md: text by heading."""
    parts = (DOCS / "migration.md").read_text().split("\n## ")[1:]
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}


def rows(text: str) -> list[tuple[str, str]]:
    """The two cells of every table row, without headings."""
    cells = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    return [(first, here) for first, here in cells if here != "here"]


def spans(text: str) -> list[str]:
    """The text of the code spans."""
    return re.findall(r"(?<!`)`([^`]+)`(?!`)", text)


# For the first line of a program: its rank 1 gets a signal after 20 steps.
SIGNALLED = """
import os, threading, time


def ask():
    import torchddp

    while torchddp.finished_steps() < 20:
        time.sleep(0.01)
    os.kill(os.getpid(), NUMBER)


if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID")) == "1":
    threading.Thread(target=ask, daemon=True).start()
"""


def signalled(code: str, number: int = signal.SIGTERM) -> str:
    return SIGNALLED.replace("NUMBER", str(int(number))) + code


def common_last_step(said: str) -> int:
    """Of the programs about StopTogether: the step after which both ranks say that they stop."""
    found = re.findall(r"rank (\d) stops after step (\d+): SIGTERM on rank 1", said)
    assert sorted(rank for rank, _ in found) == ["0", "1"], said
    (step,) = {int(step) for _, step in found}
    return step
