"""The pages of docs/: their Python code and its run; docs/migration.md taken apart."""

import re
import textwrap
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def code_in(text: str) -> str:
    """All indented blocks, as one program."""
    return textwrap.dedent("\n".join(line for line in text.splitlines() if line.startswith("    ") or not line))


def code_of(page: str, section: str | None = None) -> str:
    """The code below a heading; by default the code before the first heading."""
    parts = ("\n" + (DOCS / page).read_text()).split("\n## ")
    (text,) = [part for part in parts[1:] if part.startswith(f"{section}\n")] if section else parts[:1]
    return code_in(text)


def run_code(page: str, section: str | None = None) -> dict[str, Any]:
    """Run the code in the test's process group; return the names it defines."""
    code = re.sub(r'(torch\.)?dist\w*\.init_process_group\("gloo"\)\n', "", code_of(page, section))
    names: dict[str, Any] = {}
    exec(compile(code, page, "exec"), names)
    return names


PAGE = DOCS / "migration.md"


def sections() -> dict[str, str]:
    """Text by heading."""
    parts = PAGE.read_text().split("\n## ")[1:]
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
    return re.findall(r"`([^`]+)`", text)
