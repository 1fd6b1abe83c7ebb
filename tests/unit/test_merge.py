"""The planner: small cases, every error, and a brute-force search over all plans of random models."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchddp import _C
from torchddp.plan.buckets import finish_s, merged_buckets
from torchddp.plan.step_profile import LinearCost


def specs(numels, dtypes=None, sparse=()):
    dtypes = dtypes or [0] * len(numels)
    return [_C.ParamSpec(f"p{i}", numel, 4, dtype=dtypes[i], sparse=i in sparse) for i, numel in enumerate(numels)]


def cost(alpha_s=0.0, beta_s_per_byte=0.0, pack_s_per_byte=0.0):
    return LinearCost(alpha_s, beta_s_per_byte, pack_s_per_byte=pack_s_per_byte)


def planned(params, ready_s, cost, slack_s=0.0):
    return merged_buckets(params, range(len(params)), ready_s, cost, slack_s)


def test_costs_slack_and_order():
    assert planned(specs([1, 1, 1]), [0, 1, 2], cost(10)) == ((0, 1, 2),)
    assert planned([], [], cost(1, 1)) == ()
    assert planned(specs([1000, 1000]), [0, 0], cost(1, 0.001)) == ((0, 1),)
    assert planned(specs([1000, 1000]), [0, 0], cost(1, 0.001, 0.01)) == ((0,), (1,))
    assert len(planned(specs([1, 1, 1]), [0, 5, 10], cost(0, 0.25), 2.0)) == 1
    assert len(planned(specs([1, 1, 1]), [0, 5, 10], cost(0, 0.25), 1.5)) == 2
    assert merged_buckets(specs([1, 1, 1]), [2, 0, 1], [0.9, 10, 1], cost(0, 0.25)) == ((2, 0), (1,))


def test_kinds_do_not_mix():
    params = specs([1] * 5, dtypes=[0, 1, 0, 1, 0], sparse=[4])
    assert planned(params, range(5), cost(100, 1)) == ((0, 2), (1, 3), (4,))
    others = [_C.ParamSpec(f"p{i}", 1, 4, device=i % 2, owner=i // 2) for i in range(4)]
    assert planned(others, range(4), cost(100, 1)) == ((0,), (1,), (2,), (3,))


def test_bad_input_is_named():
    params = specs([1, 1])
    for words, call in {
        r"each must occur exactly once, got \[0, 0\]": lambda: merged_buckets(params, [0, 0], [0, 0], cost()),
        "ready_s has 1 entries for 2": lambda: planned(params, [0], cost()),
        r"ready_s\[1\] must be finite and at least 0, got -1": lambda: planned(params, [0, -1], cost()),
        "alpha_s must be finite and at least 0, got -1": lambda: planned(params, [0, 1], cost(-1)),
        "pack_s_per_byte": lambda: planned(params, [0, 1], cost(0, 0, math.nan)),
        "ready_s has 3 entries": lambda: finish_s([[0, 1]], params, [0, 1, 2], cost()),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()


def finish(buckets, params, ready_s, cost):
    """The finish time by definition, independent of the planner."""
    free_s = 0.0
    for bucket in buckets:
        nbytes = sum(4 * params[i].numel for i in bucket)
        free_s = max(free_s, max(ready_s[i] for i in bucket)) + cost.alpha_s + cost.beta_s_per_byte * nbytes
        if len(bucket) > 1:
            free_s += cost.pack_s_per_byte * nbytes
    return free_s


def all_plans(params):
    """Every way to cut the order into runs, with the resulting buckets."""
    for mask in range(1 << (len(params) - 1)):
        plan, run = [], {}
        for i, spec in enumerate(params):
            key = (spec.dtype, i if spec.sparse else -1)
            run[key] = [*run.pop(key, []), i]  # in the order of their last gradients
            if i == len(params) - 1 or mask >> i & 1:
                plan += run.values()
                run = {}
        yield plan


GRADIENT = st.tuples(st.integers(0, 10_000), st.floats(0, 1), st.integers(0, 2), st.sampled_from([False] * 6 + [True]))
COST = st.builds(cost, st.floats(0, 2), st.floats(0, 1e-4), st.sampled_from([0.0, 1e-6, 1e-4]))


@settings(deadline=None, max_examples=150)
@given(st.lists(GRADIENT, min_size=1, max_size=11), st.integers(1, 3), COST)
def test_brute_force_finds_nothing_better(gradients, kinds, this):
    numels, gaps_s, dtypes, sparse = zip(*gradients, strict=True)
    params = specs(numels, [dtype % kinds for dtype in dtypes], [i for i, is_sparse in enumerate(sparse) if is_sparse])
    ready_s = list(itertools.accumulate(gaps_s))
    buckets = planned(params, ready_s, this)
    assert len(_C.BucketPlan(buckets, params)) == len(buckets)
    best_s = min(finish(plan, params, ready_s, this) for plan in all_plans(params))
    assert finish(buckets, params, ready_s, this) == pytest.approx(best_s, rel=1e-9, abs=1e-12)
    assert finish_s(buckets, params, ready_s, this) == pytest.approx(best_s, rel=1e-9, abs=1e-12)
