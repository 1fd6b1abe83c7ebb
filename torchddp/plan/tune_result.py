"""From raw step times to the answer: which buckets, and by how much. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchddp.harness.stats import paired_ratio, summarize
from torchddp.plan.candidates import Candidate
from torchddp.plan.merge import finish_s
from torchddp.plan.plan import param_specs
from torchddp.plan.step_profile import StepProfile
from torchddp.plan.sweep import TuneResult


def predicted_ms(profile: StepProfile, candidate: Candidate) -> float:
    """The step that the planner expects of these buckets: forward, then backward until the last bucket is there."""
    ready_s = [gradient.ready_s for gradient in profile.gradients]
    end_s = finish_s(candidate.buckets, param_specs(profile), ready_s, profile.cost)
    return 1e3 * (profile.forward_s + max(end_s, profile.backward_s))


def choose(step_ms: np.ndarray, candidates: tuple[Candidate, ...]) -> int:
    """The fastest candidate; among those that no measurement tells from it, the default, then the planned one.

    Told apart: the 95% interval of the paired ratio to the fastest does not hold 1.
    """
    fastest = int(np.argmin(np.median(step_ms, axis=1)))
    for index in range(len(candidates)):  # the default and the planned one come first
        if index == fastest or paired_ratio(step_ms[index], step_ms[fastest]).ci95_low <= 1.0:
            return index
    return fastest


def tune_document(result: TuneResult) -> dict[str, Any]:
    """All numbers, for the table, the plots and JSON."""
    profile, candidates, step_ms = result.profile, result.candidates, result.step_ms
    chosen = choose(step_ms, candidates)
    rows = []
    for index, candidate in enumerate(candidates):
        rows.append(
            {
                "name": candidate.name,
                "argument": candidate.argument,
                "cap_mb": candidate.cap_mb,
                "buckets": len(candidate.buckets),
                "predicted_ms": predicted_ms(profile, candidate),
                "step_ms": summarize(step_ms[index]).to_dict(),
                "ratio_to_default": None if index == 0 else paired_ratio(step_ms[index], step_ms[0]).to_dict(),
                "chosen": index == chosen,
            }
        )
    return {
        "case": "tune",
        "model": profile.model,
        "world_size": profile.world_size,
        "transport": profile.transport,
        "gradient_bytes": profile.gradient_bytes,
        "parameters": len(profile.gradients),
        "rounds": int(step_ms.shape[1]),
        "threads": result.threads,
        "compute_ms": 1e3 * (profile.forward_s + profile.backward_s),
        "cost": {
            "alpha_us": 1e6 * profile.cost.alpha_s,
            "beta_ns_per_byte": 1e9 * profile.cost.beta_s_per_byte,
            "misfit": profile.cost.misfit,
        },
        "argument": candidates[chosen].argument,
        "candidates": rows,
        "profile": profile.to_dict(),
    }
