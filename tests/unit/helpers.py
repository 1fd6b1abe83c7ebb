"""Helpers for printed tables, rejected arguments, and waiting for processes."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console


def printed(renderable: Any, width: int = 80) -> str:
    """The printed text; asserts that no line is longer than `width` and none is truncated."""
    stream = io.StringIO()
    Console(file=stream, width=width).print(renderable)
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    return text


def assert_refused(
    main: Callable[[list[str]], int], arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Assert that the command exits with code 2 and prints one sentence with these words."""
    assert main(arguments) == 2, arguments
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1, arguments
    assert words in captured.err, arguments


def remove_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no folder for caches."""
    for name in ("TORCHDDP_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("no home")))


def wait_until(condition: Callable[[], Any], timeout_s: float = 120.0) -> bool:
    until_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.02)
    return bool(condition())
