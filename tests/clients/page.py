"""The code of docs/weighted_means.md, by section."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "weighted_means.md"


def blocks(section: str) -> list[str]:
    """What stands indented by four spaces, between other lines."""
    text = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    body = next(part for part in text if part.partition("\n")[0] == section).partition("\n")[2]
    found = re.findall(r"(?:^    [^\n]*\n(?:\n(?=    ))*)+", body, flags=re.MULTILINE)
    return [textwrap.dedent(block) for block in found]
