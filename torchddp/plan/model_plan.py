"""The planning of one wrapped model: begun, carried on before each step, ended. Its state is ``model._auto_plan``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from torchddp.plan.auto_plan import AutoPlan
from torchddp.plan.plan_cache import PlanKey, fingerprint, kept_plan
from torchddp.transport.agreement import TransportExchange, ranks_per_host

if TYPE_CHECKING:
    from torchddp.ddp.ddp_construction import DDPConstruction

logger = logging.getLogger("torchddp.ddp.module")


def start(model: DDPConstruction, *, look_for_kept: bool) -> None:
    """Plan in the steps to come, if there is a group to plan for; collective with ``look_for_kept``.

    ``look_for_kept``: take the plan kept for this model and group, where rank 0 finds one.
    """
    end(model)
    transport, device, timeout = model.reducer.transport, model._module_parameters[0].device, model._wait_limit()
    if transport.size == 1:
        return
    if look_for_kept:
        key = plan_key(model)
        kept = kept_plan(model._specs, key) if transport.rank == 0 else None
        (is_kept,) = TransportExchange(transport, int, device, timeout).of_rank_0([kept is not None])
        if is_kept:
            model.reducer.adopt_plan(kept)
            return
    model._auto_plan = AutoPlan(model.reducer, model._specs, device, timeout)


def end(model: DDPConstruction) -> None:
    """Give up, or be done; buckets stay as they are."""
    if model._auto_plan is not None:
        model._auto_plan.stop()
        model._auto_plan = None


def plan_key(model: DDPConstruction) -> PlanKey:
    """Collective: what a plan for this model and group is kept under."""
    transport, device = model.reducer.transport, model._module_parameters[0].device
    return PlanKey(
        fingerprint=fingerprint(model._specs, device.type),
        world_size=transport.size,
        ranks_per_host=ranks_per_host(TransportExchange(transport, int, device, model._wait_limit())),
        transport=transport.name,
        backend=dist.get_backend(model.process_group),
    )


@torch._disable_dynamo
def before_step(model: DDPConstruction, planning: AutoPlan) -> None:
    """At the begin of each synchronised step while ``planning`` is under way; collective in the one that plans."""
    if reason := _reason_not_to_plan(model):
        logger.warning("bucket_cap_mb='auto': the buckets stay as they are, for %s.", reason)
        end(model)
        return
    is_over = True  # also if planning fails
    try:
        is_over = planning.before_step()
    finally:
        if is_over:
            end(model)


def _reason_not_to_plan(model: DDPConstruction) -> str:
    """Why buckets must stay, the same on all ranks; empty if they need not."""
    if model._join_config.enable:
        # Ranks without inputs take no part, and the others can't know how many steps those have finished.
        return "the model is used under join()"
    if model._comm_hooks:
        return "a communication hook may keep state by bucket, and what it costs is not known"
    return "a captured CUDA graph holds them" if model.reducer.is_in_graph else ""
