"""Planning: the cost line through measured times, the decision, and plans on disk."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulated import make_profile
from torchddp import _C
from torchddp.plan.auto_plan import StepTimes, decide
from torchddp.plan.plan_cache import PlanCacheError, PlanKey, fingerprint, kept_plan, load_plan, save_plan
from torchddp.plan.step_profile import Gradient, LinearCost, ProfileError, load_profile, profile_from_dict
from torchddp.transport.message_cost import fit_line, misfit

SIZES = [4096.0 * 4**i for i in range(7)]


def specs(numels, dtypes=None):
    return [_C.ParamSpec(f"p{i}", numel, 4, dtype=0 if dtypes is None else dtypes[i]) for i, numel in enumerate(numels)]


@given(alpha=st.floats(1e-7, 1e-1), beta=st.floats(1e-13, 1e-6))
def test_a_line_is_recovered_from_its_points(alpha, beta):
    samples = [(n, alpha + beta * n) for n in SIZES]
    found = fit_line(samples)
    assert misfit(samples, *found) < 1e-6
    assert math.isclose(found[0] + found[1] * 1e6, alpha + beta * 1e6, rel_tol=1e-4)


@given(st.lists(st.tuples(st.floats(1, 1e8), st.floats(1e-7, 10)), min_size=1, max_size=8))
def test_a_line_is_never_negative(samples):
    alpha, beta = fit_line(samples)
    assert alpha >= 0 and beta >= 0 and math.isfinite(alpha) and math.isfinite(beta)
    with pytest.raises(ValueError, match="positive times"):
        fit_line([*samples, (1.0, 0.0)])


def test_a_profile_is_saved_and_loaded(tmp_path: Path):
    path = tmp_path / "p.json"
    profile = make_profile(cost=LinearCost(1e-3, 1e-9, 1e-10, 1e-4, 0.01), step_s=0.05)
    profile.save(path)
    assert load_profile(path) == profile


def test_a_wrong_profile_is_one_sentence(tmp_path: Path):
    path = tmp_path / "p.json"
    for text, words in (
        (None, "Cannot read the profile"),
        ("{", "is not JSON"),
        ("[]", "This is not a step profile"),
        ('{"kind": "torchddp benchmark"}', "This is not a step profile"),
        (
            '{"kind": "torchddp step profile", "format": 99, "torchddp_version": "9"}',
            "format 99 .written by torchddp 9",
        ),
        ('{"kind": "torchddp step profile", "format": 1}', "damaged"),
    ):
        if text is not None:
            path.write_text(text)
        with pytest.raises(ProfileError, match=words) as caught:
            load_profile(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_an_inconsistent_profile_is_refused():
    for change, words in (
        ({"order": (0, 1, 1)}, "not a permutation"),
        ({"buckets": ((0, 1), (1, 2))}, "do not hold each of its 3 gradients once"),
        ({"forward_s": math.nan}, "negative or not finite"),
        ({"forward_s": -1.0}, "negative or not finite"),
        ({"world_size": 0}, "has 0 ranks"),
        ({"gradients": ()}, "not a permutation"),
        ({"order": (0, 1, 2.5)}, "not a number"),
        ({"cost": LinearCost(0.0, 0.0, pack_s_per_byte=-1.0)}, "negative or not finite"),
        ({"gradients": (Gradient("p", -1, 4, 0, 0, False, 0.0),), "order": (0,), "buckets": ((0,),)}, "below 0"),
        ({"gradients": (Gradient("p", 1, 4, 0, 0, False, "x"),), "order": (0,), "buckets": ((0,),)}, "not a number"),
    ):
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
        assert other.path != path
        with pytest.raises(PlanCacheError, match=f"its {name} is"):
            load_plan(path, other)


def test_plans_need_a_home_or_cache_folder(monkeypatch: pytest.MonkeyPatch):
    for name in ("TORCHDDP_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(PlanCacheError, match="TORCHDDP_CACHE_DIR"):
        assert KEY.path
    assert kept_plan(specs([1]), KEY) is None


def test_a_damaged_plan_is_one_sentence(tmp_path: Path):
    path = tmp_path / "plan.json"
    head = {"kind": "torchddp bucket plan", "format": 1, **asdict(KEY)}
    wrong = [{**head, "format": 7}, head, {**head, "buckets": [[1e999]]}, {**head, "buckets": [[10**30]]}]
    for text in ("{", "[]", *map(json.dumps, wrong)):
        path.write_text(text)
        with pytest.raises(PlanCacheError) as caught:
            load_plan(path, KEY)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_fingerprint_covers_what_matters():
    base = fingerprint(specs([10, 20]), "cpu")
    assert base == fingerprint(specs([10, 20]), "cpu")
    others = [specs([10, 21]), specs([10, 20], dtypes=[0, 1]), specs([20, 10]), specs([10])]
    assert base not in {fingerprint(other, "cpu") for other in others} | {fingerprint(specs([10, 20]), "cuda")}
