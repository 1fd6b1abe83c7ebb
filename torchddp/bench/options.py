"""Options of single cases, `--set NAME=VALUE`: how their values are read. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torchddp.harness.variants import ArgumentError

Parse = Callable[[str], Any]


@dataclass(frozen=True)
class Option:
    """An option of one case. `parse` turns the text into the value and raises `ArgumentError` or `ValueError`."""

    default: Any
    parse: Parse
    help: str
    # The value with --quick; None means the default.
    quick: Any = None

    def value(self, quick: bool) -> Any:
        return self.default if self.quick is None or not quick else self.quick


def whole_number(low: int, high: int) -> Parse:
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise ArgumentError(f"must be a whole number from {low} to {high}, not '{text}'")
        return int(text)

    return parse


def one_of(names: Iterable[str]) -> Parse:
    known = tuple(names)

    def parse(text: str) -> str:
        if text not in known:
            raise ArgumentError(f"there is no '{text}'; choose from {', '.join(known)}")
        return text

    return parse


def several(parse: Parse) -> Parse:
    """Values separated by commas, without duplicates."""
    return lambda text: tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",")))


def read_option(name: str, option: Option, text: str) -> Any:
    try:
        return option.parse(text)
    except ValueError as error:  # ArgumentError is one
        raise ArgumentError(f"--set {name}: {str(error).rstrip('.')}.") from None
