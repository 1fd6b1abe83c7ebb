"""Options that an optimizer writes into its parameter groups, when each rank steps only its own parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from torchddp.transport.agreement import GroupExchange, gather_if_different, in_words

Groups = Sequence[dict[str, Any]]
_Plain = dict[str, bool | int | float | str | None]


class WrittenOptions:
    """Keeps plain values that the optimizer writes into its groups during a step equal on all ranks.

    A rank that has not written a value, because it owns nothing in the group, takes what the others have written.
    Values that depend on the gradients of a rank's own parameters, such as Prodigy's ``d``, differ between ranks and
    are not what one process would have: an error on all ranks. Once any rank has written something, ranks compare
    after every step, and before that after the steps 1, 2, 4, 8, ...

    ``possible``: whether the optimizer may write at all; the same on all ranks.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._group = process_group
        self.possible = False
        self._writes = False  # equal on all ranks
        self._steps = 0
        self._before: list[_Plain] = []

    @contextmanager
    def in_step(self, groups: Groups) -> Iterator[None]:
        """Collective at the end, also if this rank's part of the step raises an error: see `end_step`."""
        if self.possible:
            self._before = [_plain(group) for group in groups]
        try:
            yield
        except Exception:
            self.end_step(groups)
            raise
        self.end_step(groups)

    def end_step(self, groups: Groups) -> None:
        """Collective after the same steps on all ranks. RuntimeError on all if they have written different values."""
        if not self.possible or self._group.size() == 1:
            return
        self._steps += 1
        if not self._writes and self._steps & (self._steps - 1):
            return
        now = [_plain(group) for group in groups]
        written = [
            {key: value for key, value in own.items() if key not in old or in_words(value) != in_words(old[key])}
            for own, old in zip(now, self._before, strict=True)
        ]
        by_rank = gather_if_different(written, GroupExchange(self._group))
        self._writes |= any(written) if by_rank is None else any(map(any, by_rank))
        if by_rank is None:
            return
        for number, group in enumerate(groups):
            self._take(number, group, [theirs[number] for theirs in by_rank])

    def _take(self, number: int, group: dict[str, Any], by_rank: Sequence[_Plain]) -> None:
        for key in dict.fromkeys(key for written in by_rank for key in written):
            values = {rank: written[key] for rank, written in enumerate(by_rank) if key in written}
            if len(set(map(in_words, values.values()))) > 1:
                each = ", ".join(f"{value!r} on rank {rank}" for rank, value in values.items())
                raise RuntimeError(
                    f"OSS: the optimizer has written different values of {key!r} into group {number} ({each}). Each "
                    "rank steps only its own parameters, so a value that is computed from all of them must be reduced "
                    "over the ranks by the optimizer itself (Prodigy: fsdp_in_use=True), or can't be used with OSS."
                )
            value = next(iter(values.values()))
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def _plain(group: Mapping[str, Any]) -> _Plain:
    """The options that are numbers, strings, or tensors of one number."""
    found: _Plain = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            found[key] = value.item()
        elif value is None or isinstance(value, bool | int | float | str):
            found[key] = value
    return found
