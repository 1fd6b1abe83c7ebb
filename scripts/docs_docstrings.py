"""Docstrings as Markdown: what mkdocstrings reads of them for the docs site (mkdocs.yml names this file)."""

from __future__ import annotations

from typing import Any

import griffe

from scripts.docs_hooks import as_markdown


class Docstrings(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
