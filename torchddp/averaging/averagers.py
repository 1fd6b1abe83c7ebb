"""Model averaging every few steps, over all ranks or over growing groups of them."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager

from torchddp import _torch
from torchddp.averaging.flat import (
    DEFAULT_CAP_MB,
    FlatMeans,
    Named,
    ParamSource,
    buffers_now,
    check_cap,
    group_or_default,
    lost_peer,
    named_buffers,
    named_parameters,
    verify_same,
)
from torchddp.errors import TransportError, check_count
from torchddp.traffic import Traffic
from torchddp.transport.agreement import Agreement, align_group_counts


class _Averager(ModelAverager, abc.ABC):
    _alike: dict[str, object]  # options that must be equal on all ranks

    def __init__(
        self,
        params: ParamSource,
        warmup_steps: int,
        process_group: dist.ProcessGroup | None,
        buffers: bool,
        bucket_cap_mb: float,
    ) -> None:
        super().__init__(group_or_default(process_group))
        self.warmup_steps = warmup_steps
        self.traffic = Traffic(0, 0)
        self._cap_mb = bucket_cap_mb
        self._means: dict[dist.ProcessGroup, FlatMeans] = {}
        with self._agreement(self.process_group) as agreement:
            check_count("warmup_steps", warmup_steps, 0)
            check_cap(bucket_cap_mb)
            self._buffers = named_buffers(params, buffers)
            self._params = named_parameters(params)
            self._module = params if isinstance(params, nn.Module) else None  # looked through before each average
            self._buffers_of = self._module
            self._alike = {**self._check_options(), "warmup_steps": warmup_steps, "bucket_cap_mb": bucket_cap_mb}
            verify_same(self._everything, agreement, self._alike)

    @abc.abstractmethod
    def _check_options(self) -> dict[str, object]:
        """Return the options that decide when to average. ValueError for invalid ones."""

    @property
    def _everything(self) -> Named:
        return {**self._params, **self._buffers}

    def _agreement(self, group: dist.ProcessGroup) -> Agreement:
        return Agreement(type(self).__name__, group)

    def _open(self, group: dist.ProcessGroup) -> None:
        self._means[group] = FlatMeans(self._everything, group, type(self).__name__, self._cap_mb)

    @abc.abstractmethod
    def _group_due(self) -> dist.ProcessGroup | None:
        """The group that averages after this step, past warm-up; None: no group does."""

    def average_parameters(self, params: ParamSource | None = None) -> None:
        """Count a step, and average if it is due, over the largest group that is due. Raises TransportError.

        ``params``: average these from now on, instead of the constructor's; the same on all ranks.
        """
        group = self._group_due() if self.step >= self.warmup_steps else None
        if group is not None:
            self._average_over(group, params, step=self.step)
        self.step += 1

    def _average_over(self, group: dist.ProcessGroup, params: ParamSource | None, **alike: int) -> None:
        if params is None:
            params = self._module
        if params is not None or group not in self._means:
            self._take(group, self._params.items() if params is None else params, alike)
        if group not in self._means:
            self._open(group)
        means = self._means[group]
        means.use(self._everything)
        means.average(self.step)
        self.traffic = means.traffic

    def _take(self, group: dist.ProcessGroup, params: ParamSource, alike: Mapping[str, int]) -> None:
        """Average these from now on, if they are the same on all ranks of the group. Collective."""
        try:
            with self._agreement(group) as agreement:
                known = {id(p) for p in self._params.values()}
                # Those frozen meanwhile are not the same on all ranks yet.
                given = named_parameters(params, also=known)
                if self._buffers_of is not None:
                    self._buffers = buffers_now(self._buffers_of, self._buffers)
                new = {id(p) for p in given.values()} - known
                verify_same({**given, **self._buffers}, agreement, {**self._alike, **alike}, new)
        except TransportError as error:
            raise lost_peer(group, type(self).__name__, self.step, "weights", list(self._params), error) from error
        self._module = params if isinstance(params, nn.Module) else None
        if new or len(given) < len(known):
            self._params = given
            self._means.clear()


class PeriodicAverager(_Averager):
    """Averages parameters over the ranks every ``period`` steps (local SGD, Stich 2019; with warm-up, Lin et al. 2020).

    Example:

        averager = torchddp.averaging.PeriodicAverager(module, period=8)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(module(batch)).backward()
            optimizer.step()
            averager.average_parameters()

    Averages after steps ``warmup_steps + 1``, ``warmup_steps + 1 + period`` and so on. Unlike torch's
    PeriodicModelAverager, which it replaces, it averages all parameters with ``requires_grad``, even those without a
    gradient, so ranks may use different ones. All ranks then hold the same bits. 16-bit parameters are summed in fp32.
    It looks through a module before each average: thawed, added and replaced parameters are averaged too, and those
    frozen later still are.

    Args:
        params: a module, or its parameters (with names, if errors should name them), or an optimizer's groups.
        warmup_steps: steps before the first average, in which something else (`DistributedDataParallel`) averages the
            gradients. Initial weights are not synchronized here.
        process_group: the ranks to average over; None: the default process group.
        buffers: average floating-point buffers too; ``params`` must be a module. It may replace them by others of the
            same shape.
        bucket_cap_mb: the size in MiB of a message, and of the buffer kept for it.

    Construction and averages are collective. Raises ValueError and TypeError for invalid options and parameters, and
    RuntimeError on all ranks if these differ between ranks. Attributes: `step`, the calls of `average_parameters` so
    far (checkpoint it); `traffic`, the bytes of the last average (`torchddp.traffic`).
    """

    def __init__(
        self,
        params: ParamSource,
        period: int,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        *,
        buffers: bool = False,
        bucket_cap_mb: float = DEFAULT_CAP_MB,
    ) -> None:
        self.period = period
        super().__init__(params, warmup_steps, process_group, buffers, bucket_cap_mb)
        self._open(self.process_group)

    def _check_options(self) -> dict[str, object]:
        check_count("period", self.period, 1, " step")
        return {"period": self.period}

    def _group_due(self) -> dist.ProcessGroup | None:
        return self.process_group if (self.step - self.warmup_steps) % self.period == 0 else None

    def average_now(self, params: ParamSource | None = None) -> None:
        """Average now, whatever the step count, which does not change. Collective. Raises TransportError."""
        self._average_over(self.process_group, params)


class HierarchicalAverager(_Averager):
    """Averages over small groups often, and over larger ones less often (hierarchical SGD, Lin et al. 2020, 3.2).

    Example:

        world_size = dist.get_world_size()  # for example 64
        # Every 4 steps within half of the ranks, every 16 steps over all of them.
        averager = torchddp.averaging.HierarchicalAverager(module, {4: world_size // 2, 16: world_size})
        for batch in loader:
            optimizer.zero_grad()
            loss_of(module(batch)).backward()
            optimizer.step()
            averager.average_parameters()

    Works like torch's HierarchicalModelAverager: at step s (counted from 0, without the ``warmup_steps``), only the
    group with the largest period that divides s averages. Collective and raising as `PeriodicAverager`, whose arguments
    it has but for:

    Args:
        periods: maps each period to the size of its groups of neighboring ranks, in ascending order; or pairs of a
            period and this rank's process group. The last group must be all ranks of ``process_group``.
    """

    def __init__(
        self,
        params: ParamSource,
        periods: Mapping[int, int] | Sequence[tuple[int, dist.ProcessGroup]],
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        *,
        buffers: bool = False,
        bucket_cap_mb: float = DEFAULT_CAP_MB,
    ) -> None:
        self._periods = periods
        super().__init__(params, warmup_steps, process_group, buffers, bucket_cap_mb)
        self.period_process_group_dict: dict[int, dist.ProcessGroup] = {}
        for period, group in self._pairs:
            if isinstance(group, int):
                whole = group == self.process_group.size()
                group = self.process_group if whole else _group_of_neighbors(group, self.process_group)
            self.period_process_group_dict[period] = group
            self._open(group)

    def _check_options(self) -> dict[str, object]:
        periods = self._periods
        self._pairs: list[tuple[int, Any]] = list(periods.items() if isinstance(periods, Mapping) else periods)
        sizes = [(period, size if isinstance(size, int) else size.size()) for period, size in self._pairs]
        _check_levels(sizes, self.process_group.size())
        return {"periods": ", ".join(f"{size} ranks every {period} steps" for period, size in sizes)}

    def _group_due(self) -> dist.ProcessGroup | None:
        by_size = reversed(self.period_process_group_dict.items())
        return next((group for period, group in by_size if self.step % period == 0), None)


def _check_levels(levels: Sequence[tuple[int, int]], world_size: int) -> None:
    shown = ", ".join(f"{period}: {size}" for period, size in levels)
    if not levels:
        raise ValueError("periods must not be empty: give {period: group size}, or pairs of period and process group")
    if levels[0][0] < 1:
        raise ValueError(f"periods must be at least 1 step, got {levels[0][0]}")
    if any(a >= b for (a, _), (b, _) in zip(levels, levels[1:], strict=False)):
        raise ValueError(f"periods must ascend, got {{{shown}}}")
    if any(a >= b for (_, a), (_, b) in zip(levels, levels[1:], strict=False)):
        raise ValueError(f"group sizes must grow with their periods, got {{{shown}}}")
    if levels[-1][1] != world_size:
        raise ValueError(f"the last group must be all {world_size} ranks of the process group, got {{{shown}}}")
    if uneven := next((size for _, size in levels if size < 1 or world_size % size != 0), None):
        raise ValueError(f"group sizes must divide the {world_size} ranks of the process group, got {uneven}")


def _group_of_neighbors(size: int, process_group: dist.ProcessGroup) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(process_group)
    first = process_group.rank() // size * size
    align_group_counts(process_group)
    return _torch.new_local_group(ranks[first : first + size])
