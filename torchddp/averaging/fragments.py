"""Which parameters are synchronised together by Streaming DiLoCo. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def plan_fragments(names: Sequence[str], fragments: int) -> list[list[str]]:
    """Names by fragment: each takes every ``fragments``-th layer ("strided" in Douillard et al. 2025).

    A layer is what a number in the name tells apart ("blocks.3.attention.weight": "blocks.3"), otherwise a module.
    Where there are fewer layers than fragments, each parameter counts as one.

    Raises:
        ValueError: fewer than one fragment, or more than parameters.
    """
    if not 1 <= fragments <= len(names):
        raise ValueError(
            f"fragments must be at least 1 and at most {len(names)}, the number of parameters, got {fragments}"
        )
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(_layer_of(name), []).append(name)
    units = list(layers.values()) if len(layers) >= fragments else [[name] for name in names]
    return [[name for unit in units[start::fragments] for name in unit] for start in range(fragments)]


def fragment_starts(sync_every: int, fragments: int) -> list[int]:
    """After which step of a round of ``sync_every`` (1 is the first) each fragment's synchronisation starts."""
    return [(index + 1) * sync_every // fragments for index in range(fragments)]


def _layer_of(name: str) -> str:
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1]) or name
