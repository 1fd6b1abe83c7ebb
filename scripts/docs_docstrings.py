"""A griffe extension that converts docstrings to Markdown for the docs site (see mkdocs.yml)."""

from __future__ import annotations

from typing import Any

import griffe

from scripts.docs_hooks import as_markdown, fenced


class Docstrings(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(as_markdown(obj.docstring.value))
