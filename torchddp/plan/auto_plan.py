"""``bucket_cap_mb="auto"``: measure the first steps, plan, switch once, and be quiet."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchddp import _C
from torchddp.plan.calibrate import NoRoomError, measure_cost
from torchddp.plan.merge import finish_s
from torchddp.plan.plan import buckets_of, planned_buckets
from torchddp.plan.recorder import StepRecorder, StepTimes
from torchddp.plan.step_profile import LinearCost

logger = logging.getLogger("torchddp.ddp.module")

# Buckets follow the measured order from the second step on, and first steps are slow for other reasons too.
WARMUP_STEPS = 3
RECORDED_STEPS = 5
# Predictions closer than this are equal: the buckets stay as they are.
LEAST_GAIN = 0.01


@dataclass(frozen=True)
class Decision:
    """What planning came to. The same on all ranks, but for ``plan``, which only rank 0's counts of."""

    times: StepTimes
    cost: LinearCost
    before_s: float  # predicted, from the begin of backward until the last bucket is reduced
    after_s: float
    plan: _C.BucketPlan


def decide(
    specs: Sequence[_C.ParamSpec],
    times: StepTimes,
    cost: LinearCost,
    current: _C.BucketPlan,
) -> Decision:
    """The plan with the least predicted exposed time; the current one if that is hardly worse. Pure."""
    best = planned_buckets(specs, times.order, times.ready_s, cost)
    before_s, after_s = (finish_s(buckets, specs, times.ready_s, cost) for buckets in (buckets_of(current), best))
    if before_s - after_s < LEAST_GAIN * (times.forward_s + before_s):
        return Decision(times, cost, before_s, before_s, current)
    return Decision(times, cost, before_s, after_s, _C.BucketPlan(best, specs))


class AutoPlan:
    """Plans once for one reducer. ``before_step`` is called at the begin of every step that will be synchronised."""

    def __init__(
        self,
        reducer: _C.Reducer,
        specs: Sequence[_C.ParamSpec],
        device: torch.device,
        timeout: datetime.timedelta = datetime.timedelta(0),
    ) -> None:
        self._reducer, self._specs, self._device, self._timeout = reducer, specs, device, timeout
        self._begin_at = reducer.stats()["finished"] + WARMUP_STEPS
        self._recorder: StepRecorder | None = None
        self.decision: Decision | None = None

    def before_step(self) -> bool:
        """Collective in the step that plans; whether planning is over.

        All ranks have finished equally many synchronised steps, so they measure and plan in the same ones.
        """
        if self._recorder is None:
            if self._reducer.stats()["finished"] >= self._begin_at:
                self._recorder = StepRecorder(self._reducer)
            return False
        self._recorder.collect()
        if self._recorder.steps < RECORDED_STEPS:
            return False
        self._recorder.stop()
        times = self._recorder.times(self._device, self._timeout)
        self._plan(times)
        return True

    def stop(self) -> None:
        """Give up; buckets stay as they are."""
        if self._recorder is not None:
            self._recorder.stop()

    def _plan(self, times: StepTimes) -> None:
        transport = self._reducer.transport
        try:
            cost = measure_cost(transport, self._device, self._timeout)
        except NoRoomError as error:
            logger.warning("bucket_cap_mb='auto': the buckets stay as they are, for %s.", error)
            return
        decision = self.decision = decide(self._specs, times, cost, self._reducer.plan)
        count = len(self._reducer.plan)
        changed = self._reducer.adopt_plan(decision.plan)
        if transport.rank == 0:
            logger.info(
                "bucket_cap_mb='auto': %s after %d measured steps; the last bucket is expected %.2f ms after backward "
                "began, with the buckets so far %.2f ms (a message takes %.1f us and %.3f ns a byte)",
                f"{len(self._reducer.plan)} buckets in place of {count}" if changed else f"{count} buckets as before",
                RECORDED_STEPS,
                1e3 * decision.after_s,
                1e3 * decision.before_s,
                1e6 * cost.alpha_s,
                1e9 * cost.beta_s_per_byte,
            )
