"""Covering arrays: few rows in which every combination of values of any two (or three) columns occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

Row = dict[str, str]
Columns = Mapping[str, Sequence[str]]
Combination = tuple[tuple[str, str], ...]
# Values that a row doesn't have together.
Forbidden = Sequence[Mapping[str, set[str]]]
TRIES = 6  # rows that each step chooses from


def covering_array(columns: Columns, strength: int, forbidden: Forbidden, seed: int = 0) -> list[Row]:
    """Rows in which every combination of `strength` columns' values occurs that some valid row has.

    Greedy: each row starts from a combination that is still missing, and of several random ways to complete it, the one
    that covers most is taken. The same arguments give the same rows.
    """
    source = random.Random(seed)
    missing = dict.fromkeys(combinations(columns, strength))
    rows = []
    while missing:
        start = next(iter(missing))
        found = [row for _ in range(TRIES) if (row := complete(dict(start), columns, forbidden, source)) is not None]
        if not found:
            del missing[start]  # no valid row has it
            continue
        rows.append(max(found, key=lambda row: sum(each in missing for each in within(row, strength))))
        for each in within(rows[-1], strength):
            missing.pop(each, None)
    return rows


def combinations(columns: Columns, strength: int) -> Iterator[Combination]:
    """All combinations of values of any `strength` columns."""
    for names in itertools.combinations(columns, strength):
        for values in itertools.product(*(columns[name] for name in names)):
            yield tuple(zip(names, values, strict=True))


def within(row: Row, strength: int) -> Iterator[Combination]:
    """Those that a row has."""
    return itertools.combinations(row.items(), strength)


def complete(start: Row, columns: Columns, forbidden: Forbidden, source: random.Random | None = None) -> Row | None:
    """A valid row that has these values; None if there is none. Without a source, the first possible values."""
    possible = {name: [start[name]] if name in start else list(values) for name, values in columns.items()}
    found = _search(possible, forbidden, source)
    return None if found is None else {name: found[name][0] for name in columns}


def _search(
    possible: dict[str, list[str]], forbidden: Forbidden, source: random.Random | None
) -> dict[str, list[str]] | None:
    if not _propagate(possible, forbidden):
        return None
    open_names = [name for name, values in possible.items() if len(values) > 1]
    if not open_names:
        return possible
    name = open_names[0] if source is None else source.choice(open_names)
    for value in possible[name] if source is None else source.sample(possible[name], len(possible[name])):
        chosen = {**{other: list(values) for other, values in possible.items()}, name: [value]}
        if (found := _search(chosen, forbidden, source)) is not None:
            return found
    return None


def _propagate(possible: dict[str, list[str]], forbidden: Forbidden) -> bool:
    """Remove the values that can't be chosen any more. False if a column has none left."""
    changed = True
    while changed:
        changed = False
        for values in forbidden:
            # Columns in which the values can still be avoided.
            free = [name for name, bad in values.items() if not bad.issuperset(possible[name])]
            if not free:
                return False
            if len(free) == 1 and not values[free[0]].isdisjoint(possible[free[0]]):
                possible[free[0]] = [value for value in possible[free[0]] if value not in values[free[0]]]
                changed = True
    return True
