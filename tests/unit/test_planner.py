"""Bucket planning: message costs, default sizes, plans against brute force, the decision, and files on disk."""

import itertools
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness import each
from tests.simulated import make_profile
from tests.unit.helpers import remove_home
from torchddp import _C
from torchddp.ddp import bucket_sizes
from torchddp.ddp.bucket_sizes import shared_sizes
from torchddp.ddp.module import options_of
from torchddp.plan.auto_plan import StepTimes, decide
from torchddp.plan.buckets import finish_s, merged_buckets
from torchddp.plan.plan_cache import PlanCacheError, PlanKey, fingerprint, kept_plan, load_plan, save_plan
from torchddp.plan.step_profile import Gradient, LinearCost, ProfileError, load_profile, profile_from_dict
from torchddp.transport.message_cost import MessageLine, fit_line, misfit

SIZES = [4096.0 * 4**i for i in range(7)]


def specs(numels, dtypes=None, sparse=()):
    dtypes = dtypes or [0] * len(numels)
    return [_C.ParamSpec(f"p{i}", numel, 4, dtype=dtypes[i], sparse=i in sparse) for i, numel in enumerate(numels)]


@given(alpha=st.floats(1e-7, 1e-1), beta=st.floats(1e-13, 1e-6))
def test_a_cost_line_is_recovered_from_its_points(alpha, beta):
    samples = [(n, alpha + beta * n) for n in SIZES]
    found = fit_line(samples)
    assert misfit(samples, *found) < 1e-6
    assert math.isclose(found[0] + found[1] * 1e6, alpha + beta * 1e6, rel_tol=1e-4)


@given(st.lists(st.tuples(st.floats(1, 1e8), st.floats(1e-7, 10)), min_size=1, max_size=8))
def test_a_cost_line_is_never_negative(samples):
    alpha, beta = fit_line(samples)
    assert alpha >= 0 and beta >= 0 and math.isfinite(alpha) and math.isfinite(beta)
    with pytest.raises(ValueError, match="positive times"):
        fit_line([*samples, (1.0, 0.0)])


def test_a_profile_is_saved_and_loaded_and_an_invalid_file_is_refused(tmp_path):
    path = tmp_path / "p.json"
    profile = make_profile(cost=LinearCost(1e-3, 1e-9, 1e-10, 1e-4, 0.01), step_s=0.05)
    profile.save(path)
    assert load_profile(path) == profile
    path = tmp_path / "wrong.json"
    cases = (
        (None, "Cannot read the profile"),
        ("{", "is not JSON"),
        ("[]", "This is not a step profile"),
        ('{"kind": "torchddp benchmark"}', "This is not a step profile"),
        (
            '{"kind": "torchddp step profile", "format": 99, "torchddp_version": "9"}',
            "format 99 .written by torchddp 9",
        ),
        ('{"kind": "torchddp step profile", "format": 1}', "damaged"),
    )
    for text, words in each(cases):
        if text is not None:
            path.write_text(text)
        with pytest.raises(ProfileError, match=words) as caught:
            load_profile(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_an_inconsistent_profile_is_refused():
    cases = (
        ({"order": (0, 1, 1)}, "not a permutation"),
        ({"buckets": ((0, 1), (1, 2))}, "do not hold each of its 3 gradients once"),
        ({"forward_s": math.nan}, "negative, not finite"),
        ({"forward_s": -1.0}, "negative, not finite"),
        ({"forward_s": 1e300}, "too long"),
        ({"device": None}, "not a printable text"),
        ({"model": "\x1b[2J"}, "not a printable text"),
        (
            {"gradients": (Gradient("p", 1, 0, 0, 0, False, 0.0),), "order": (0,), "buckets": ((0,),)},
            "impossible",
        ),
        ({"gradients": (Gradient("p", 1, 4, 0, 0, 2, 0.0),), "order": (0,), "buckets": ((0,),)}, "neither sparse nor"),
        ({"world_size": 0}, "has 0 ranks"),
        ({"gradients": ()}, "not a permutation"),
        ({"order": (0, 1, 2.5)}, "not a number"),
        ({"cost": LinearCost(0.0, 0.0, pack_s_per_byte=-1.0)}, "negative, not finite"),
        ({"gradients": (Gradient("p", -1, 4, 0, 0, False, 0.0),), "order": (0,), "buckets": ((0,),)}, "below 0"),
        ({"gradients": (Gradient("p", 1, 4, 0, 0, False, "x"),), "order": (0,), "buckets": ((0,),)}, "not a number"),
    )
    for change, words in each(cases):
        with pytest.raises(ProfileError, match=words):
            replace(make_profile(), **change)
        if list(change) in (["order"], ["buckets"], ["world_size"]):
            with pytest.raises(ProfileError, match=words):
                profile_from_dict(json.loads(json.dumps({**make_profile().to_dict(), **change})))


def test_buckets_change_only_for_a_gain():
    params = specs([1000] * 4)
    current = _C.make_bucket_plan(params, [0, 1, 2, 3], [1])  # one parameter per bucket
    ready = StepTimes((0.0, 0.01, 0.02, 0.03), 0.01)
    dear = decide(params, ready, LinearCost(0.02, 0.0), current)
    assert len(dear.plan) < len(current) and dear.after_s < dear.before_s
    cheap = decide(params, ready, LinearCost(1e-6, 0.0), current)
    assert cheap.plan == current and cheap.after_s == cheap.before_s


KEY = PlanKey("abc", 2, 2, "c10d", "gloo")


def test_a_plan_is_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHDDP_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    path = KEY.path
    assert load_plan(path, KEY) is None
    save_plan(path, ((1,), (0, 2)), KEY, {"why": 1})
    assert load_plan(path, KEY) == ((1,), (0, 2))
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    others = {"fingerprint": "abd", "world_size": 3, "ranks_per_host": 1, "transport": "shm", "backend": "nccl"}
    for name, value in others.items():
        other = replace(KEY, **{name: value})
        assert other.path != path, name
        with pytest.raises(PlanCacheError, match=f"its {name} is"):
            load_plan(path, other)


def test_what_others_put_in_the_cache_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A FIFO, on which reading would wait for a writer, among others."""
    monkeypatch.setenv("TORCHDDP_CACHE_DIR", str(tmp_path))
    elsewhere = tmp_path / "plan.json"
    save_plan(elsewhere, ((0,),), KEY, None)
    places = {
        "a FIFO": os.mkfifo,
        "a folder": os.mkdir,
        "a link": lambda path: path.symlink_to(elsewhere),
        "nested too deeply": lambda path: path.write_text("[" * 100_000),
        "bytes": lambda path: (path.touch(), os.truncate(path, 2**30)),
        "not JSON": lambda path: path.write_bytes(b"\xff\0"),
    }
    for words, make in each(places.items()):
        make(KEY.path)
        with pytest.raises(PlanCacheError, match="can't be read") as caught:
            load_plan(KEY.path, KEY)
        assert "\n" not in str(caught.value)
        assert kept_plan(specs([1]), KEY) is None
        KEY.path.rmdir() if words == "a folder" else KEY.path.unlink()


def test_saving_a_plan_needs_a_home_or_cache_folder(monkeypatch: pytest.MonkeyPatch):
    remove_home(monkeypatch)
    with pytest.raises(PlanCacheError, match="TORCHDDP_CACHE_DIR"):
        assert KEY.path
    assert kept_plan(specs([1]), KEY) is None


def test_a_fingerprint_covers_sizes_dtypes_order_and_device():
    base = fingerprint(specs([10, 20]), "cpu")
    assert base == fingerprint(specs([10, 20]), "cpu")
    others = [specs([10, 21]), specs([10, 20], dtypes=[0, 1]), specs([20, 10]), specs([10])]
    assert base not in {fingerprint(other, "cpu") for other in others} | {fingerprint(specs([10, 20]), "cuda")}


def cost(alpha_s=0.0, beta_s_per_byte=0.0, pack_s_per_byte=0.0):
    return LinearCost(alpha_s, beta_s_per_byte, pack_s_per_byte=pack_s_per_byte)


def planned(params, ready_s, cost, slack_s=0.0):
    return merged_buckets(params, range(len(params)), ready_s, cost, slack_s)


def test_merged_buckets_follow_costs_slack_order_and_kinds():
    assert planned(specs([1, 1, 1]), [0, 1, 2], cost(10)) == ((0, 1, 2),)
    assert planned([], [], cost(1, 1)) == ()
    assert planned(specs([1000, 1000]), [0, 0], cost(1, 0.001)) == ((0, 1),)
    assert planned(specs([1000, 1000]), [0, 0], cost(1, 0.001, 0.01)) == ((0,), (1,))
    assert len(planned(specs([1, 1, 1]), [0, 5, 10], cost(0, 0.25), 2.0)) == 1
    assert len(planned(specs([1, 1, 1]), [0, 5, 10], cost(0, 0.25), 1.5)) == 2
    assert merged_buckets(specs([1, 1, 1]), [2, 0, 1], [0.9, 10, 1], cost(0, 0.25)) == ((2, 0), (1,))
    params = specs([1] * 5, dtypes=[0, 1, 0, 1, 0], sparse=[4])
    assert planned(params, range(5), cost(100, 1)) == ((0, 2), (1, 3), (4,))
    others = [_C.ParamSpec(f"p{i}", 1, 4, device=i % 2, owner=i // 2) for i in range(4)]
    assert planned(others, range(4), cost(100, 1)) == ((0,), (1,), (2,), (3,))


def test_invalid_arguments_are_named():
    params = specs([1, 1])
    cases = {
        r"each must occur exactly once, got \[0, 0\]": lambda: merged_buckets(params, [0, 0], [0, 0], cost()),
        "ready_s has 1 entries for 2": lambda: planned(params, [0], cost()),
        r"ready_s\[1\] must be finite and at least 0, got -1": lambda: planned(params, [0, -1], cost()),
        "alpha_s must be finite and at least 0, got -1": lambda: planned(params, [0, 1], cost(-1)),
        "pack_s_per_byte": lambda: planned(params, [0, 1], cost(0, 0, math.nan)),
        "ready_s has 3 entries": lambda: finish_s([[0, 1]], params, [0, 1, 2], cost()),
    }.items()
    for words, call in each(cases):
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
def test_brute_force_finds_no_better_plan(gradients, kinds, this):
    numels, gaps_s, dtypes, sparse = zip(*gradients, strict=True)
    params = specs(numels, [dtype % kinds for dtype in dtypes], [i for i, is_sparse in enumerate(sparse) if is_sparse])
    ready_s = list(itertools.accumulate(gaps_s))
    buckets = planned(params, ready_s, this)
    assert len(_C.BucketPlan(buckets, params)) == len(buckets)
    best_s = min(finish(plan, params, ready_s, this) for plan in all_plans(params))
    assert finish(buckets, params, ready_s, this) == pytest.approx(best_s, rel=1e-9, abs=1e-12)
    assert finish_s(buckets, params, ready_s, this) == pytest.approx(best_s, rel=1e-9, abs=1e-12)


KIB, MIB = 1024, 1024 * 1024


def test_default_sizes_grow_with_the_fixed_cost_of_a_message():
    # The times of an almost empty message and of a 1 MiB message.
    for small_us, mebibyte_us, cap_mib, solo_kib in (
        (2.5, 21, 1, 256),  # two ranks with one processor each
        (3.5, 21, 1, 256),  # the same with measurement error
        (46, 104, 4, 512),  # four ranks that share two processors
        (94, 342, 2, 256),  # eight ranks on two processors
        (1000, 1100, 25, 3200),  # the cost per byte is negligible
    ):
        line = MessageLine(small_us * 1e-6, (mebibyte_us - small_us) * 1e-6 / MIB)
        assert shared_sizes(line) == (cap_mib * MIB, solo_kib * KIB), (small_us, mebibyte_us)


@given(st.floats(0, 1), st.floats(0, 1e-6), st.floats(1, 100))
def test_default_sizes_keep_within_their_limits_and_the_fixed_cost_about_an_eighth(alpha_s, beta_s_per_byte, factor):
    cap, solo = shared_sizes(MessageLine(alpha_s, beta_s_per_byte))
    assert cap in {*(MIB << step for step in range(5)), 25 * MIB}
    assert 256 * KIB <= solo <= cap // 4
    # The cap may be too small by half a step, a factor of sqrt(2).
    assert cap == 25 * MIB or alpha_s <= math.sqrt(2) / 7 * cap * beta_s_per_byte * (1 + 1e-9)
    assert shared_sizes(MessageLine(alpha_s * factor, beta_s_per_byte)) >= (cap, solo)


def test_options_set_bucket_caps_and_the_size_of_adopted_gradients():
    for arguments, caps in (
        ({}, []),
        ({"bucket_cap_mb": "auto"}, []),
        ({"bucket_cap_mb": 0.5}, [512 * KIB]),
        ({"bucket_cap_mb_list": [1, 3]}, [MIB, 3 * MIB]),
    ):
        assert options_of(**arguments).asked_caps == caps, arguments
    # The size from which gradients on a device are reduced where autograd allocated them.
    for arguments, expected in (
        ({}, MIB),
        ({"gradient_as_bucket_view": False}, MIB),
        ({"gradient_as_bucket_view": True}, 0),
    ):
        assert options_of(**arguments).in_place_bytes == expected, arguments


class AnyMemory:
    reaches_any_memory = True


@pytest.mark.parametrize(("device", "sizes"), [("cpu", ([MIB, 8 * MIB], MIB)), ("meta", ([MIB, 25 * MIB], 0))])
def test_transports_that_read_any_memory_get_fixed_sizes_by_device(device, sizes):
    parameters = [torch.empty(4 * MIB, device=device)]
    assert bucket_sizes.default_sizes(parameters, AnyMemory(), None) == sizes
