"""mkdocs hooks that adapt the pages of docs/ for the site (see mkdocs.yml).

The pages are written for GitHub too, where links to ../csrc work.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results"

_COMMANDS = re.compile(
    r"(\w+=\S+ )*(sudo |\$ )?"
    r"(apt-get|cd|git|make|pip|pre-commit|python|srun|torchddp|torchrun|\S+/(python|\S+\.sh))(?=\s|$)"
)
_FENCE = re.compile(r"( *)(```+)(\w*)")
_MARKER = re.compile(r"<!-- (ranks|fragment|varies|runs|not run)(?:: (.+?))? -->")
_FRAGMENT = re.compile(r"^<!-- fragment(?:: .+?)? -->\n```python$", re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(((?:\.\./)+[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A code block of a page: its lines, counted from 0, its code, and the marker before it."""

    start: int
    end: int
    language: str
    code: str
    marker: tuple[str, str] | None
    fenced: bool


def blocks(text: str) -> Iterator[Block]:
    """All code blocks of a page: fenced, or indented by four spaces after an empty line."""
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        if fence := _FENCE.match(lines[at]):
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == fence[2]) + 1
            code = "\n".join(lines[at + 1 : end - 1])
            yield Block(at, end, fence[3], code, _marker(lines[:at]), fenced=True)
        elif lines[at].startswith("    ") and not "".join(lines[max(at - 1, 0) : at]).strip():
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            while not lines[end - 1].strip():
                end -= 1
            code = "\n".join(line[4:] for line in lines[at:end])
            yield Block(at, end, _guessed(code), code, _marker(lines[:at]), fenced=False)
        else:
            end = at + 1
        at = end


def examples(documented: Any) -> Iterator[Block]:
    """The Python blocks in the docstrings of a function, or of a class and its own methods."""
    methods = filter(inspect.isroutine, getattr(documented, "__dict__", {}).values())
    for each in (documented, *methods):
        yield from (block for block in blocks(inspect.cleandoc(each.__doc__ or "")) if block.language == "python")


def _marker(before: list[str]) -> tuple[str, str] | None:
    last = next((line for line in reversed(before) if line.strip()), "")
    found = _MARKER.fullmatch(last.strip())
    return (found[1], found[2] or "") if found else None


def _guessed(code: str) -> str:
    if all(_COMMANDS.match(line) for line in code.splitlines() if line.strip()):
        return "sh"
    try:
        ast.parse(code)
    except SyntaxError:
        return "text"
    return "python"


def on_config(config: Any) -> None:
    if config.extra["repository"]:
        config.extra["social"] = [{"icon": "fontawesome/brands/github", "link": config.extra["repository"]}]


def on_files(files: Any, config: Any) -> None:
    """Adds benchmark results, which pages show and link, to the site."""
    from mkdocs.structure.files import File

    for path in sorted((ROOT / RESULTS).iterdir()):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    marked = _FRAGMENT.sub('```python title="A fragment"', fenced(markdown))
    plain = re.sub(rf"^ *{_MARKER.pattern}\n", "", marked, flags=re.MULTILINE)
    return linked_outside(plain, page.file.src_uri, config.extra["repository"])


def fenced(text: str) -> str:
    """Fences indented blocks, so that they are highlighted."""
    lines = text.split("\n")
    for block in reversed(list(blocks(text))):
        if not block.fenced:
            lines[block.start : block.end] = [f"```{block.language}", *block.code.split("\n"), "```"]
    return "\n".join(lines)


def linked_outside(text: str, page: str, repository: str) -> str:
    """Points links out of docs/ to the repository, or keeps only their text without one. Results are in the site."""
    folder = os.path.dirname(page)

    def replaced(found: re.Match[str]) -> str:
        image, label, target = found.groups()
        path = os.path.normpath(os.path.join("docs", folder, target.partition("#")[0]))
        if path.startswith("docs/") or not (ROOT / path).exists():
            return found[0]  # mkdocs reports it if it is broken
        if os.path.dirname(path) == RESULTS:
            return f"{image}[{label}]({os.path.relpath(f'results/{os.path.basename(path)}', folder or '.')})"
        if not repository:
            return label
        return f"{image}[{label}]({repository}/{'raw' if image else 'blob'}/main/{path})"

    return _LINK.sub(replaced, text)


def as_markdown(text: str) -> str:
    """Strips Sphinx-only markup from a docstring and turns the pages that it names into links."""
    text = re.sub(r":(?:class|func|meth|mod|attr|exc):`~?([^`]+)`", r"`\1`", text)
    text = re.sub(r"^ *::\n\n", "", text, flags=re.MULTILINE)
    return re.sub(r"(`*)docs/(\w+)\.md\1", lambda page: f"[{page[2].replace('_', ' ')}](../{page[2]}.md)", text)
