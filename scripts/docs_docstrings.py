"""Docstrings as Markdown: what mkdocstrings reads of them for the docs site (mkdocs.yml names this file)."""

from __future__ import annotations

import re
from typing import Any

import griffe


def as_markdown(text: str) -> str:
    text = re.sub(r":(?:class|func|meth|mod|attr|exc):`~?([^`]+)`", r"`\1`", text)
    text = re.sub(r"^\s*::\n\n?", "", text, flags=re.MULTILINE)
    return re.sub(r"(`*)docs/(\w+)\.md\1", r"[\2](../\2.md)", text)


class Docstrings(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
