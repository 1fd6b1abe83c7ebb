"""What the options of developers' cases take: numbers, names, and lists of them."""

from __future__ import annotations

from collections.abc import Iterable

from torchddp.bench.cases import Parse
from torchddp.harness.variants import ArgumentError


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
