"""The planning of one wrapped model, kept in ``model._auto_plan`` while it is under way."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchddp import _C
from torchddp.plan.auto_plan import BucketPlanning
from torchddp.plan.plan_cache import PlanKey


class ModelSession:
    """A wrapped model, as planning sees it."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def reducer(self) -> _C.Reducer:
        return self._model.reducer

    @property
    def specs(self) -> Sequence[_C.ParamSpec]:
        return self._model._specs

    @property
    def device(self) -> torch.device:
        return self._model._module_parameters[0].device

    @property
    def wait_limit(self) -> datetime.timedelta:
        return self._model._wait_limit()

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self._model.process_group

    @property
    def has_comm_hook(self) -> bool:
        return bool(self._model._comm_hooks)

    @property
    def joins(self) -> bool:
        return self._model._join_config.enable


def start(model: Any, *, look_for_kept: bool) -> None:
    """See `BucketPlanning.start`."""
    end(model)
    planning = BucketPlanning(ModelSession(model))
    planning.start(look_for_kept)
    model._auto_plan = planning if planning.is_under_way else None


def before_step(model: Any, planning: BucketPlanning) -> None:
    """See `BucketPlanning.before_step`."""
    try:
        planning.before_step()
    finally:
        if not planning.is_under_way:
            model._auto_plan = None


def end(model: Any) -> None:
    """See `BucketPlanning.end`."""
    if model._auto_plan is not None:
        model._auto_plan.end()
        model._auto_plan = None


def plan_key(model: Any) -> PlanKey:
    """See `BucketPlanning.key`."""
    return BucketPlanning(ModelSession(model)).key()
