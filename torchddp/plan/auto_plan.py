"""``bucket_cap_mb="auto"``: uses a saved plan, or measures the first steps and plans once."""

from __future__ import annotations

import datetime
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchddp import _C, _torch
from torchddp.ddp.observers import StepObserver
from torchddp.ddp.session import ReducerSession
from torchddp.plan.buckets import buckets_of, finish_s, planned_buckets
from torchddp.plan.cost import measure_cost
from torchddp.plan.plan_cache import PlanKey, fingerprint, kept_plan
from torchddp.plan.step_profile import LinearCost
from torchddp.transport.agreement import TransportExchange, ranks_per_host
from torchddp.transport.message_cost import NoRoomError
from torchddp.transport.store import is_first_in_job

logger = logging.getLogger("torchddp.distributed")

# Buckets follow the order of gradients only from the second step on, and first steps are slow for other reasons too.
WARMUP_STEPS = 3
RECORDED_STEPS = 5
# Buckets change only if the predicted gain is at least this share of a step.
LEAST_GAIN = 0.01


@dataclass(frozen=True)
class StepTimes:
    """Median times over the recorded steps, in seconds, each of the slowest rank. Equal on all ranks."""

    ready_s: tuple[float, ...]  # by parameter, since backward began
    forward_s: float

    @property
    def backward_s(self) -> float:
        """Computation alone, up to the last gradient."""
        return max(self.ready_s)

    @property
    def order(self) -> tuple[int, ...]:
        """Parameter indices in the order in which their gradients became ready."""
        return tuple(sorted(range(len(self.ready_s)), key=lambda index: self.ready_s[index]))


class StepRecorder:
    """Records a reducer's synchronized steps. While it records, buckets are launched after the step's last gradient."""

    def __init__(self, reducer: _C.Reducer) -> None:
        self._reducer = reducer
        self._rows: list[list[float]] = []
        self.resume()

    def pause(self) -> None:
        """Run steps as usual, without recording them, until `resume`: buckets are launched as soon as they are full."""
        self._reducer.set_overlap(True)
        self._reducer.record_ready_times(False)

    def resume(self) -> None:
        self._finished = self._reducer.stats()["finished"]
        self._reducer.record_ready_times(True)
        self._reducer.set_overlap(False)

    def collect(self) -> int:
        """Add the step that has ended since the last call, if any; the number of steps so far. Between steps."""
        finished = self._reducer.stats()["finished"]
        if finished != self._finished:
            self._finished = finished
            times_ns = (*self._reducer.get_backward_stats(), self._reducer.forward_ns())
            self._rows.append([time_ns / 1e9 for time_ns in times_ns])
        return len(self._rows)

    def times(self, device: torch.device, timeout: datetime.timedelta) -> StepTimes:
        """Combine what all ranks have recorded. Collective. ValueError: no synchronized step was recorded."""
        if not self._rows:
            raise ValueError("no synchronized step was recorded: run forward and backward outside no_sync()")
        mine = [statistics.median(column) for column in zip(*self._rows, strict=True)]
        by_rank = TransportExchange(self._reducer.transport, float, device, timeout).gather(mine)
        *ready_s, forward_s = (max(column) for column in zip(*by_rank, strict=True))
        return StepTimes(tuple(ready_s), forward_s)


@dataclass(frozen=True)
class Decision:
    before_s: float  # predicted, from the start of backward until the last bucket of the old plan is reduced
    after_s: float  # the same with ``plan``
    plan: _C.BucketPlan


def decide(specs: Sequence[_C.ParamSpec], times: StepTimes, cost: LinearCost, current: _C.BucketPlan) -> Decision:
    """Return the plan with the least predicted exposed time, or the current one if it is hardly worse. Pure."""
    best = planned_buckets(specs, times.order, times.ready_s, cost)
    before_s, after_s = (finish_s(buckets, specs, times.ready_s, cost) for buckets in (buckets_of(current), best))
    if before_s - after_s < LEAST_GAIN * (times.forward_s + before_s):
        return Decision(before_s, before_s, current)
    return Decision(before_s, after_s, _C.BucketPlan(best, specs))


class BucketPlanning(StepObserver):
    """Plans one model's buckets, step by step. Starts at once if ``bucket_cap_mb="auto"``."""

    def __init__(self, session: ReducerSession) -> None:
        self._session = session
        self.is_under_way = False  # whether the next steps are measured for a plan
        self._begin_at = 0  # the number of finished steps after which to record
        self._recorder: StepRecorder | None = None
        if session.options.plans_buckets:
            self.start(look_for_kept=session.is_collective)

    def start(self, look_for_kept: bool) -> None:
        """Plan from the next steps. ``look_for_kept``: or use the plan that rank 0 finds saved. Collective then."""
        self.close()
        session, reducer = self._session, self._session.reducer
        if reducer.transport.size == 1:
            return
        if look_for_kept:
            key = plan_key(session)
            kept = kept_plan(session.specs, key) if reducer.transport.rank == 0 else None
            (is_kept,) = session.exchange(int).of_rank_0([kept is not None])
            if is_kept:
                reducer.adopt_plan(kept)
                return
        self._begin_at = reducer.stats()["finished"] + WARMUP_STEPS
        self.is_under_way = True

    def before_step(self) -> None:
        """Measure or plan, if planning is under way. Collective in the step that plans."""
        if self.is_under_way and self._session.synchronizes:
            self._carry_on()

    def close(self) -> None:
        self.is_under_way = False
        if self._recorder is not None:
            self._recorder.pause()
            self._recorder = None

    @_torch.disable_dynamo
    def _carry_on(self) -> None:
        session = self._session
        if reason := self._reason_not_to_plan():
            _warn_that_buckets_stay(reason, session.process_group)
            self.close()
        elif self._recorder is not None:
            recorder = self._recorder
            if recorder.collect() == RECORDED_STEPS:
                self.close()  # also if planning fails
                self._plan(recorder.times(session.device, session.wait_limit))
        elif session.reducer.stats()["finished"] >= self._begin_at:
            self._recorder = StepRecorder(session.reducer)

    def _plan(self, times: StepTimes) -> None:
        session, reducer = self._session, self._session.reducer
        try:
            cost = measure_cost(reducer.transport, session.device, session.wait_limit)
        except NoRoomError as error:
            _warn_that_buckets_stay(str(error), session.process_group)
            return
        decision = decide(session.specs, times, cost, reducer.plan)
        count = len(reducer.plan)
        changed = reducer.adopt_plan(decision.plan)
        if reducer.transport.rank == 0:
            logger.info(
                "bucket_cap_mb='auto': %s after %d measured steps; the last one is expected to finish %.2f ms after "
                "backward begins, with the previous buckets %.2f ms (a message takes %.1f us plus %.3f ns per byte)",
                f"buckets: {len(reducer.plan)} instead of {count}" if changed else f"buckets: {count} as before",
                RECORDED_STEPS,
                1e3 * decision.after_s,
                1e3 * decision.before_s,
                1e6 * cost.alpha_s,
                1e9 * cost.beta_s_per_byte,
            )

    def _reason_not_to_plan(self) -> str:
        """Why the buckets must not change, the same on all ranks; empty if they may."""
        if self._session.joins:
            # Ranks that have run out of inputs don't plan, and the others can't know how many steps they have finished.
            return "the model is used under join()"
        if self._session.reduces_now:
            return "gradients are reduced after backward"  # all are ready by then, so no order is better than another
        if self._session.has_comm_hook:
            return "a communication hook may keep state per bucket, and its cost is unknown"
        return "a captured CUDA graph uses them" if self._session.reducer.is_in_graph else ""


def _warn_that_buckets_stay(reason: str, process_group: dist.ProcessGroup) -> None:
    if is_first_in_job(f"buckets stay because {reason}", process_group):
        logger.warning("bucket_cap_mb='auto': the buckets stay as they are, because %s.", reason)


def plan_key(session: ReducerSession) -> PlanKey:
    """The key under which a plan for this model and group is saved. Collective."""
    transport = session.reducer.transport
    return PlanKey(
        fingerprint=fingerprint(session.specs, session.device.type),
        world_size=transport.size,
        ranks_per_host=ranks_per_host(session.exchange(int)),
        transport=transport.name,
        backend=dist.get_backend(session.process_group),
    )
