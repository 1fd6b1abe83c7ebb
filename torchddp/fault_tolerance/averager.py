"""Local SGD between replicas that come and go."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchddp import notices
from torchddp.averaging.flat import DEFAULT_CAP_MB, Named, ParamSource, named_parameters, plan_buckets, problem_of
from torchddp.errors import check_count
from torchddp.fault_tolerance.manager import Manager, check_manager, count_participants


class PeriodicAverager:
    """`torchddp.averaging.PeriodicAverager` under a ``torchft.Manager``: averages parameters over the participating
    replicas every ``period`` steps (local SGD, Stich 2019).

        averager = PeriodicAverager(manager, model, period=8)
        for batch in data:
            ...; optimizer.step()
            averager.average_parameters()

    Like torchft's LocalSGD, but with a few flat messages in flight at once instead of one per parameter, and with a
    different schedule: it averages after steps ``warmup_steps + 1``, ``warmup_steps + 1 + period`` and so on. It starts
    the quorum and calls ``should_commit()`` itself; nothing else may. A failed average leaves parameters unchanged, and
    the next one uses the remaining replicas. Healing replicas get weights through the manager's ``state_dict``
    functions. 16-bit parameters are averaged in fp32. Parameters that are thawed later are averaged too, and those
    frozen later still are.

    Args:
        manager: a separate one, which no model's gradients go through.
        params: a module, or its parameters; equal on all replicas.
        period: steps between averages.
        warmup_steps: steps before the first average.
        bucket_cap_mb: MiB per message. A copy of all parameters is held during an average.

    Construction does not communicate.

    Raises:
        TypeError: ``manager`` is not a Manager, or something in ``params`` is not a parameter.
        ValueError: the manager has no process group, or an option or parameter is invalid.

    Attributes:
        step: number of calls of `average_parameters`; include it in checkpoints.
    """

    def __init__(
        self,
        manager: Manager,
        params: ParamSource,
        period: int,
        warmup_steps: int = 0,
        *,
        bucket_cap_mb: float = DEFAULT_CAP_MB,
    ) -> None:
        check_manager(manager, "PeriodicAverager")
        check_count("period", period, 1, " step")
        check_count("warmup_steps", warmup_steps, 0)
        self.step = 0
        self.period, self.warmup_steps = period, warmup_steps
        self._manager = manager
        self._params = list(params) if isinstance(params, Iterator) else params
        self._bucket_cap_mb = bucket_cap_mb
        self._named: Named = {}
        self._plan()

    def _plan(self) -> None:
        """Plan the buckets if there are new parameters to average, or some are gone."""
        named = named_parameters(self._params, also={id(param) for param in self._named.values()})
        if (problem := problem_of(named)) is not None:
            raise problem
        if [*map(id, named.values())] != [*map(id, self._named.values())]:
            self._named, self._buckets = named, plan_buckets(named, self._bucket_cap_mb)

    @torch.no_grad()
    def average_parameters(self) -> bool:
        """Count a step, and average if it is due. Returns whether parameters were averaged.

        Raises:
            TransportError: there was no quorum within the manager's time limits.
        """
        step, self.step = self.step, self.step + 1
        if step < self.warmup_steps or (step - self.warmup_steps) % self.period:
            return False
        self._plan()
        manager = self._manager
        manager.start_quorum()
        count_participants(manager)
        flats = [bucket.new_flat() for bucket in self._buckets]
        works = []
        for bucket, flat in zip(self._buckets, flats, strict=True):
            bucket.pack(flat)
            works.append(manager.allreduce(flat))
        for work in works:
            work.wait()  # False after an error, which the manager has recorded
        if not manager.should_commit():  # gives a healing replica its weights before they are averaged
            notices.tell("retry", what="average", step=step)
            return False
        for bucket, flat in zip(self._buckets, flats, strict=True):
            bucket.unpack(flat)
        return True
