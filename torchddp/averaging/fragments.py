"""Which parameters DiLoCo synchronizes together, and after which steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def check_overlap(overlap_steps: int, sync_every: int, fragments: int) -> None:
    if fragments > sync_every:
        raise ValueError(f"fragments must be at most sync_every={sync_every}, one per step, got {fragments}")
    if not 0 <= overlap_steps < sync_every // fragments:
        raise ValueError(
            f"overlap_steps must be at least 0 and below sync_every // fragments = {sync_every // fragments}, so that "
            f"one fragment is in transit at a time, got {overlap_steps}"
        )


def plan_fragments(names: Sequence[str], fragments: int) -> list[list[str]]:
    """Names by fragment: each takes every ``fragments``-th layer ("strided" in Douillard et al. 2025).

    A layer is a name up to its first number ("blocks.3.attention.weight": "blocks.3"), or else a module. If there are
    fewer layers than fragments, each parameter counts as one. ValueError: too few or too many fragments.
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
    """After which step of a round of ``sync_every`` (1 is the first) each fragment's synchronization starts."""
    return [(index + 1) * sync_every // fragments for index in range(fragments)]


def _layer_of(name: str) -> str:
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1]) or name
