"""Steps by hand, and what must hold of every prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulated import MB, make_profile, with_host
from torchddp.cli.tune_run import DEFAULT_CAPS_MB, make_candidates
from torchddp.harness.variants import ArgumentError
from torchddp.plan.buckets import Buckets, best_buckets
from torchddp.plan.step_profile import LinearCost, StepProfile
from torchddp.simulate.network import ALGORITHMS, MEASURED, PRESETS, RING, Link
from torchddp.simulate.predict import Message, Scene, make_point, model_error, predict, run_backward


def test_three_buckets_that_hide_but_for_the_last() -> None:
    # 4, 2 and 1 MB at 1 ms + 1 ms per MB, ready after 10, 20 and 30 ms.
    found = predict(make_profile(), MEASURED, 2)
    times = (found.step_s, found.exposed_s, found.comm_s, found.compute_s, found.efficiency)
    assert times == pytest.approx((0.010 + 0.032, 0.002, 0.010, 0.040, 40 / 42))
    assert found.buckets == ((2,), (1,), (0,)) and found.algorithm == RING
    # 1 ms + 5 ms per MB: 21, 11 and 6 ms, one after the other from 10 ms on.
    queue = predict(make_profile(cost=LinearCost(1e-3, 5e-9)), MEASURED, 2)
    assert queue.step_s == pytest.approx(0.010 + 0.010 + 0.021 + 0.011 + 0.006)


def test_a_bucket_waits_for_its_last_gradient() -> None:
    found = predict(make_profile(), MEASURED, 2, buckets=((2, 0), (1,)))
    assert found.step_s == pytest.approx(0.010 + 0.030 + 0.006 + 0.003)
    assert found.buckets == ((2, 0), (1,))


def test_communication_that_burns_the_core_delays_compute() -> None:
    messages = [Message(10, 5, 4), Message(20, 3, 3), Message(30, 2, 1)]
    assert run_backward(30, messages, shared_cpu=False).spans == ((10, 15), (20, 23), (30, 32))
    shared = run_backward(30, messages, shared_cpu=True)
    assert shared.spans == ((10, 15), (24, 27), (37, 39)) and shared.end_s == 39


def fluid_end(backward_s: float, messages: list[Message]) -> float:
    """The same by walking through time: while a message travels, compute has the share of the core that it leaves."""
    now_s = progress_s = 0.0
    for message in messages:
        waited_s = max(0.0, min(message.ready_s, backward_s) - progress_s)
        now_s += waited_s + message.duration_s
        progress_s = min(backward_s, progress_s + waited_s + message.duration_s - message.host_s)
    return now_s + backward_s - progress_s


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 5), st.floats(0, 1)), max_size=8))
def test_the_lag_is_what_sharing_the_core_comes_to(drawn: list[tuple[float, float, float]]) -> None:
    messages = [Message(ready, duration, duration * share) for ready, duration, share in drawn]
    end_s = run_backward(10.0, messages, shared_cpu=True).end_s
    assert end_s == pytest.approx(fluid_end(10.0, messages))
    assert end_s >= 10.0 + sum(message.host_s for message in messages) - 1e-9


def profiles(device: str) -> st.SearchStrategy[StepProfile]:
    gradient = st.tuples(st.floats(0.001, 50), st.floats(0, 30))

    def build(gradients: list[tuple[float, float]], alpha: float, beta: float, host: float) -> StepProfile:
        sizes, ready = [size for size, _ in gradients], [ready for _, ready in gradients]
        profile = make_profile(sizes, ready, cost=LinearCost(alpha, beta), device=device)
        return with_host(profile, host * beta, host * alpha)

    gradients = st.lists(gradient, min_size=1, max_size=6)
    return st.builds(build, gradients, st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-8), st.floats(0, 1))


ANY_PROFILE = st.one_of(profiles("cpu"), profiles("cuda"))
ANY_LINK = st.sampled_from([MEASURED, *PRESETS.values(), Link("own", "own", 1e7, None)])
ANY_ALGORITHM = st.sampled_from(ALGORITHMS)


@given(ANY_PROFILE, ANY_LINK, st.just(1) | st.integers(1, 4096), st.integers(1, 16), ANY_ALGORITHM)
def test_a_step_takes_at_least_its_compute(profile, link, world_size, ranks_per_host, algorithm):
    found = predict(profile, link, world_size, ranks_per_host, algorithm)
    assert found.step_s >= found.compute_s and found.exposed_s >= 0 and 0 < found.efficiency <= 1
    assert found.step_s == pytest.approx(found.compute_s + found.exposed_s)
    assert found.exposed_s <= found.comm_s + 1e-12 or profile.device == "cpu"
    assert world_size > 1 or (found.step_s, found.efficiency) == (found.compute_s, 1.0)
    assert (found.comm_s == 0) == (world_size == 1)


SOME = st.sampled_from(["auto", "ring", "doubling"])


@given(ANY_PROFILE, SOME, st.integers(2, 4096), st.floats(1e6, 1e11), st.floats(1, 100))
def test_more_bandwidth_is_never_slower(profile, algorithm, world_size, bytes_per_s, factor):
    slow, fast = (Link("own", "own", rate, 1e-5) for rate in (bytes_per_s, bytes_per_s * factor))
    times = [predict(profile, link, world_size, algorithm=algorithm).step_s for link in (slow, fast)]
    assert times[1] <= times[0] * (1 + 1e-12)


@given(ANY_PROFILE, ANY_LINK, st.integers(1, 11))
def test_more_ranks_are_never_faster_on_a_ring(profile: StepProfile, link: Link, power: int) -> None:
    times = [predict(profile, link, n, algorithm=RING).step_s for n in (2**power, 2 ** (power + 1))]
    assert times[0] <= times[1] * (1 + 1e-12)


def test_auto_is_what_the_recorded_software_has() -> None:
    small = make_profile([0.001] * 3)
    assert predict(small, PRESETS["eth10"], 4096).algorithm == "tree"
    assert predict(replace(small, device="cpu"), PRESETS["eth10"], 4096).algorithm == "ring"
    assert predict(small, PRESETS["eth10"], 64, 8).algorithm in ("hierarchical", "tree")
    assert predict(make_profile([500] * 3), PRESETS["eth10"], 4).algorithm == "ring"
    with pytest.raises(ArgumentError, match="There is no algorithm 'magic'"):
        predict(small, MEASURED, 2, algorithm="magic")


@pytest.mark.parametrize(("recorded_gbit", "rate_gbit"), [(10, 0.1), (1, 1), (0.1, 10)])
def test_a_profile_of_one_link_predicts_another(recorded_gbit: float, rate_gbit: float) -> None:
    """Two ranks whose software takes 0.5 ns per byte and 100 us per message, over links that do what they promise."""

    def over(gbit: float) -> LinearCost:
        return LinearCost(1.4e-4, max(0.5e-9, 8e-9 / gbit), host_s_per_byte=0.5e-9, host_s_per_message=1e-4)

    recorded, truth = (make_profile(cost=over(gbit), device="cpu") for gbit in (recorded_gbit, rate_gbit))
    expected = predict(truth, MEASURED, 2).step_s
    assert predict(recorded, Link("own", "own", rate_gbit * 1e9 / 8, 2e-5), 2).step_s == pytest.approx(expected)
    assert predict(recorded, Link("own", "own", rate_gbit * 1e9 / 8, None), 2).step_s == pytest.approx(expected)


def by_cap(profile: StepProfile) -> dict[float, Buckets]:
    return {one.cap_mb: one.buckets for one in make_candidates(profile, DEFAULT_CAPS_MB) if one.cap_mb is not None}


def test_gradients_that_share_a_bucket_are_copied() -> None:
    packed = make_profile(cost=LinearCost(1e-3, 1e-9, pack_s_per_byte=2e-9))
    assert predict(packed, MEASURED, 2).comm_s == pytest.approx(0.010)
    together = predict(packed, MEASURED, 2, buckets=((2, 0), (1,)))
    assert together.comm_s == pytest.approx((1 + 5 * (1 + 2) + 1 + 2) / 1e3)
    on_cpu = predict(replace(packed, device="cpu"), MEASURED, 2, buckets=((2, 0), (1,)))
    assert on_cpu.step_s == pytest.approx(0.010 + 0.030 + 0.016 + 0.003)  # the last ready: no compute is left to delay


def test_the_best_plan_merges_where_messages_are_dear() -> None:
    profile = make_profile([0.1] * 6, [30, 25, 20, 15, 10, 5], cost=LinearCost(1e-5, 1e-9))
    caps = by_cap(profile)
    scene = Scene(algorithm="ring")
    near, far = (make_point(profile, PRESETS["eth1"], n, scene, caps, best_buckets) for n in (2, 4096))
    assert not near.is_worth_changing
    assert len(far.best.buckets) == 1 and far.gain > 0.5 and far.is_worth_changing
    assert far.gain == pytest.approx(1 - far.best.step_s / far.recorded.step_s)


@given(ANY_PROFILE, ANY_LINK, st.sampled_from([1, 2, 64, 4096]), st.sampled_from([1, 8]))
def test_the_best_plan_is_never_worse(profile: StepProfile, link: Link, world_size: int, ranks_per_host: int) -> None:
    point = make_point(profile, link, world_size, Scene(ranks_per_host), by_cap(profile), best_buckets)
    assert point.best.step_s <= min(point.recorded.step_s, point.capped.step_s) and 0 <= point.gain < 1
    assert sorted(i for bucket in point.best.buckets for i in bucket) == sorted(profile.order)


def test_what_a_step_takes_besides_counts_everywhere() -> None:
    lean, fat = make_profile(), replace(make_profile(), overhead_s=0.5)
    for world_size in (1, 2, 64):
        before, after = (predict(profile, PRESETS["eth10"], world_size) for profile in (lean, fat))
        assert (after.step_s, after.compute_s) == pytest.approx((before.step_s + 0.5, before.compute_s + 0.5))
        assert after.exposed_s == before.exposed_s


def test_the_model_is_compared_with_the_recorded_step() -> None:
    assert model_error(make_profile(step_s=0.042)) == pytest.approx(0, abs=1e-9)
    assert model_error(make_profile(step_s=0.084)) == pytest.approx(-0.5)
    assert model_error(make_profile(step_s=0.042, world_size=1)) is None
    assert model_error(make_profile()) is None  # no step was measured
    assert make_profile().gradient_bytes == 7 * MB
