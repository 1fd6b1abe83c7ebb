"""The simulator: all-reduce costs against closed forms, steps computed by hand, and properties of every prediction."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulated import MB, make_profile, with_host
from torchddp.cli.tune_run import DEFAULT_CAPS_MB, make_candidates
from torchddp.harness.variants import ArgumentError
from torchddp.plan.buckets import Buckets
from torchddp.plan.step_profile import LinearCost, StepProfile
from torchddp.simulate.network import (
    ALGORITHMS,
    HIERARCHICAL,
    MEASURED,
    PRESETS,
    RING,
    TREE,
    AllReduce,
    Hop,
    Layout,
    Line,
    Link,
    all_reduce_lines,
    make_hop,
    parse_link,
)
from torchddp.simulate.predict import Message, Scene, make_all_reduce, make_point, model_error, predict, run_backward

# alpha 10 us, beta 1 ns per byte between hosts; 1 us and 0.01 ns within a host.
OUTER = Hop(10e-6, 1e-9, 0.0, 0.0)
INNER = Hop(1e-6, 1e-11, 0.0, 0.0)
# The share of an Ethernet frame that TCP payload fills.
TCP = 1448 / 1538


def lines(algorithm: str, world_size: int, ranks_per_host: int = 1) -> list[Line]:
    return all_reduce_lines(algorithm, Layout(world_size, ranks_per_host), OUTER, INNER, (RING, TREE))


def test_costs_of_algorithms_match_their_closed_forms() -> None:
    for algorithm, world_size, ranks_per_host, alpha_us, beta_ns in (
        (RING, 2, 1, 20, 1.0),
        (RING, 4, 1, 60, 1.5),
        (RING, 4, 4, 6, 0.015),  # one host: its internal link
        (RING, 8, 4, 14 * (10 + 3 * 1) / 4, 1.75),  # one step of four crosses between hosts
    ):
        (line,) = lines(algorithm, world_size, ranks_per_host)
        expected = pytest.approx((alpha_us * 1e-6, beta_ns * 1e-9))
        assert (line.cost.alpha_s, line.cost.beta_s_per_byte) == expected, (algorithm, world_size, ranks_per_host)
    first, *_, last = lines(TREE, 4)
    # 2 x (2 log2(4) + 2 blocks) rounds, each with a block of 1 / (2 blocks).
    assert (first.cost.alpha_s, first.cost.beta_s_per_byte) == pytest.approx((2 * 6 * 10e-6, 6e-9))
    assert last.cost.beta_s_per_byte == pytest.approx(2e-9, rel=1e-3)  # down and up, each at the full rate
    # Powers of two come close to the best number of blocks.
    nbytes, rounds = 1e7, 4
    exact = min(2 * (rounds + 2 * k) * (10e-6 + nbytes * 1e-9 / (2 * k)) for k in range(1, 4096))
    assert AllReduce(lines(TREE, 4)).best(nbytes).cost.seconds(nbytes) == pytest.approx(exact, rel=0.03)
    assert AllReduce(lines(TREE, 4)).best(nbytes).cost.seconds(nbytes) >= exact * (1 - 1e-12)
    either = AllReduce([*lines(RING, 4096), *lines(TREE, 4096)])
    assert [either.best(nbytes).algorithm for nbytes in (64, 1e6, 1e12)] == [TREE, TREE, RING]
    flat, on_hosts = lines(TREE, 4)[0].cost, lines(TREE, 32, 8)[0].cost
    assert on_hosts.alpha_s - flat.alpha_s == pytest.approx(2 * 7 * 1e-6)
    assert on_hosts.beta_s_per_byte - flat.beta_s_per_byte == pytest.approx(7 * 1e-11)
    ring, *_ = lines(HIERARCHICAL, 8, 4)
    assert ring.cost.alpha_s == pytest.approx(6 * 1e-6 + 2 * 10e-6)
    assert ring.cost.beta_s_per_byte == pytest.approx(1.5 * 1e-11 + 1.0 * 1e-9)
    # A link faster than one rank's CPU: four ranks drive it four times as fast.
    busy = replace(OUTER, wire_s_per_byte=1e-11, host_s_per_byte=4e-9)
    (line,) = all_reduce_lines(HIERARCHICAL, Layout(8, 4), busy, INNER, (RING,))
    assert (line.cost.beta_s_per_byte, line.cost.host_s_per_byte) == pytest.approx((1.5e-11 + 1e-9, 1e-9))
    assert Layout(9, 4).hosts == 3 and Layout(3, 4).local == 3  # a host that is not full counts as full
    (alone,) = lines(HIERARCHICAL, 4, 4)
    assert (alone.cost.alpha_s, alone.cost.beta_s_per_byte) == pytest.approx((6e-6, 1.5e-11))


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1e-6)), min_size=1, max_size=12),
    st.lists(st.floats(0, 1e9), min_size=1, max_size=8),
)
def test_the_cheapest_line_for_each_size_is_found(costs: list[tuple[float, float]], sizes: list[float]) -> None:
    all_reduce = AllReduce([Line(str(i), LinearCost(*c)) for i, c in enumerate(costs)])
    for nbytes in sizes:
        least = min(alpha + nbytes * beta for alpha, beta in costs)
        assert all_reduce.best(nbytes).cost.seconds(nbytes) == pytest.approx(least, rel=1e-9, abs=1e-12)
    between = all_reduce.lines_between(min(sizes), max(sizes))
    assert {all_reduce.best(nbytes).algorithm for nbytes in sizes} <= {line.algorithm for line in between}


@given(
    st.sampled_from(ALGORITHMS[1:]), st.integers(2, 4096), st.integers(1, 16), st.floats(0, 1e-4), st.floats(0, 1e-8)
)
def test_cpu_time_never_exceeds_the_total_time(algorithm, world_size, ranks_per_host, step_s, s_per_byte):
    outer, inner = (
        replace(hop, step_s=hop.step_s + step_s, host_step_s=step_s, host_s_per_byte=s_per_byte)
        for hop in (OUTER, INNER)
    )
    for line in all_reduce_lines(algorithm, Layout(world_size, ranks_per_host), outer, inner, (RING, TREE)):
        assert line.cost.host_s_per_message <= line.cost.alpha_s * (1 + 1e-9)
        assert line.cost.host_s_per_byte <= line.cost.beta_s_per_byte * (1 + 1e-9)


@pytest.mark.parametrize(("device", "world_size"), [("cpu", 2), ("cpu", 8), ("cuda", 64)])
def test_the_recorded_link_has_the_recorded_cost(device: str, world_size: int) -> None:
    profile = with_host(make_profile(device=device, world_size=world_size), 0.4e-9, 2e-4)
    # Measured with two ranks: one byte moved per byte, in two steps, but no more than the recorded cost.
    volume, steps = 2 * (world_size - 1) / world_size, 2 * (world_size - 1)
    host = (min(1e-9, volume * 0.4e-9), min(1e-3, steps / 2 * 2e-4)) if device == "cpu" else (0.0, 0.0)
    (line,) = make_all_reduce(profile, MEASURED, Layout(world_size)).lines
    found = (line.cost.alpha_s, line.cost.beta_s_per_byte, line.cost.host_s_per_byte, line.cost.host_s_per_message)
    assert found == pytest.approx((1e-3, 1e-9, *host))


def test_recorded_costs_are_scaled_to_other_world_sizes_and_links() -> None:
    (line,) = make_all_reduce(make_profile(world_size=2), MEASURED, Layout(8)).lines
    # 14 steps instead of 2, 1.75 bytes moved instead of 1.
    assert (line.cost.alpha_s, line.cost.beta_s_per_byte) == pytest.approx((7e-3, 1.75e-9))
    profile = with_host(make_profile(device="cpu"), 0.4e-9, 2e-4)
    slow, fast = (make_hop(profile, parse_link(text)) for text in ("100mbit", "400gbit,5us"))
    assert slow.s_per_byte == pytest.approx(80e-9 / TCP) and slow.step_s == pytest.approx(0.5e-3)  # recorded latency
    assert fast.s_per_byte == pytest.approx(0.4e-9) and fast.step_s == pytest.approx(5e-6 + 1e-4)
    hop = make_hop(with_host(make_profile(device="cuda"), 1e-9, 1e-3), Link("l", "l", 1e10, 1e-6))
    assert hop == Hop(1e-6, 1e-10, 0.0, 0.0)
    # A profile of shared memory, say: faster than TCP.
    profile = with_host(make_profile(device="cpu"), 5e-9, 1e-2)
    recorded, other = make_hop(profile, MEASURED), make_hop(profile, parse_link("400gbit,0us"))
    assert recorded.s_per_byte == pytest.approx(1e-9) and recorded.step_s == pytest.approx(0.5e-3)
    assert other.s_per_byte == pytest.approx(5e-9) and other.step_s == pytest.approx(5e-3)
    assert make_hop(profile, parse_link("1gbit")).step_s == pytest.approx(5e-3)


def test_links_are_parsed_by_name_and_by_rate() -> None:
    assert parse_link("ETH10") is PRESETS["eth10"] and parse_link("measured") is MEASURED
    assert parse_link("25gbit,16us") == Link("25gbit,16us", "25gbit, 16us", 25e9 / 8 * TCP, 16e-6)
    spaced = parse_link("2.5 Mbit , 1ms")
    assert (spaced.bytes_per_s, spaced.latency_s) == pytest.approx((2.5e6 / 8 * TCP, 1e-3))
    assert parse_link("1tbit").latency_s is None
    rates = [link.bytes_per_s or 0 for link in PRESETS.values()]
    assert rates == sorted(rates, reverse=True)


def test_predicted_steps_match_steps_computed_by_hand() -> None:
    # 4, 2 and 1 MB at 1 ms + 1 ms per MB, ready after 10, 20 and 30 ms.
    found = predict(make_profile(), MEASURED, 2)
    times = (found.step_s, found.exposed_s, found.comm_s, found.compute_s, found.efficiency)
    assert times == pytest.approx((0.010 + 0.032, 0.002, 0.010, 0.040, 40 / 42))
    assert found.buckets == ((2,), (1,), (0,)) and found.algorithm == RING
    # 1 ms + 5 ms per MB: 21, 11 and 6 ms, in sequence from 10 ms on.
    queue = predict(make_profile(cost=LinearCost(1e-3, 5e-9)), MEASURED, 2)
    assert queue.step_s == pytest.approx(0.010 + 0.010 + 0.021 + 0.011 + 0.006)
    found = predict(make_profile(), MEASURED, 2, buckets=((2, 0), (1,)))
    assert found.step_s == pytest.approx(0.010 + 0.030 + 0.006 + 0.003)
    assert found.buckets == ((2, 0), (1,))
    messages = [Message(10, 5, 4), Message(20, 3, 3), Message(30, 2, 1)]
    assert run_backward(30, messages, shared_cpu=False) == 32  # sent from 10 to 15, 20 to 23, 30 to 32
    assert run_backward(30, messages, shared_cpu=True) == 39  # from 10 to 15, 24 to 27, 37 to 39


def fluid_end(backward_s: float, messages: list[Message]) -> float:
    """Simulates time directly: while a message is in flight, compute gets the share of the core that it leaves."""
    now_s = progress_s = 0.0
    for message in messages:
        waited_s = max(0.0, min(message.ready_s, backward_s) - progress_s)
        now_s += waited_s + message.duration_s
        progress_s = min(backward_s, progress_s + waited_s + message.duration_s - message.host_s)
    return now_s + backward_s - progress_s


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 5), st.floats(0, 1)), max_size=8))
def test_backward_on_a_shared_core_matches_a_direct_simulation(drawn: list[tuple[float, float, float]]) -> None:
    messages = [Message(ready, duration, duration * share) for ready, duration, share in drawn]
    end_s = run_backward(10.0, messages, shared_cpu=True)
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


SOME = st.sampled_from(["auto", "ring", "tree"])


@given(ANY_PROFILE, SOME, st.integers(2, 4096), st.floats(1e6, 1e11), st.floats(1, 100))
def test_more_bandwidth_is_never_slower(profile, algorithm, world_size, bytes_per_s, factor):
    slow, fast = (Link("own", "own", rate, 1e-5) for rate in (bytes_per_s, bytes_per_s * factor))
    times = [predict(profile, link, world_size, algorithm=algorithm).step_s for link in (slow, fast)]
    assert times[1] <= times[0] * (1 + 1e-12)


@given(ANY_PROFILE, ANY_LINK, st.integers(1, 11))
def test_more_ranks_are_never_faster_on_a_ring(profile: StepProfile, link: Link, power: int) -> None:
    times = [predict(profile, link, n, algorithm=RING).step_s for n in (2**power, 2 ** (power + 1))]
    assert times[0] <= times[1] * (1 + 1e-12)


def test_auto_chooses_from_the_algorithms_of_the_recorded_backend() -> None:
    small = make_profile([0.001] * 3)
    assert predict(small, PRESETS["eth10"], 4096).algorithm == "tree"
    assert predict(replace(small, device="cpu"), PRESETS["eth10"], 4096).algorithm == "ring"
    assert predict(small, PRESETS["eth10"], 64, 8).algorithm in ("hierarchical", "tree")
    assert predict(make_profile([500] * 3), PRESETS["eth10"], 4).algorithm == "ring"
    with pytest.raises(ArgumentError, match="There is no algorithm 'magic'"):
        predict(small, MEASURED, 2, algorithm="magic")


@pytest.mark.parametrize(("recorded_gbit", "rate_gbit"), [(10, 0.1), (1, 1), (0.1, 10)])
def test_a_profile_of_one_link_predicts_another(recorded_gbit: float, rate_gbit: float) -> None:
    """Two ranks whose software takes 0.5 ns per byte and 100 us per message, over links at their nominal rate."""

    def over(gbit: float) -> LinearCost:
        return LinearCost(1.4e-4, max(0.5e-9, 8e-9 / gbit), host_s_per_byte=0.5e-9, host_s_per_message=1e-4)

    recorded, truth = (make_profile(cost=over(gbit), device="cpu") for gbit in (recorded_gbit, rate_gbit))
    expected = predict(truth, MEASURED, 2).step_s
    assert predict(recorded, Link("own", "own", rate_gbit * 1e9 / 8, 2e-5), 2).step_s == pytest.approx(expected)
    assert predict(recorded, Link("own", "own", rate_gbit * 1e9 / 8, None), 2).step_s == pytest.approx(expected)


def by_cap(profile: StepProfile) -> dict[float, Buckets]:
    return {one.cap_mb: one.buckets for one in make_candidates(profile, DEFAULT_CAPS_MB) if one.cap_mb is not None}


def test_packing_is_charged_only_for_buckets_with_several_gradients() -> None:
    packed = make_profile(cost=LinearCost(1e-3, 1e-9, pack_s_per_byte=2e-9))
    assert predict(packed, MEASURED, 2).comm_s == pytest.approx(0.010)
    together = predict(packed, MEASURED, 2, buckets=((2, 0), (1,)))
    assert together.comm_s == pytest.approx((1 + 5 * (1 + 2) + 1 + 2) / 1e3)
    on_cpu = predict(replace(packed, device="cpu"), MEASURED, 2, buckets=((2, 0), (1,)))
    assert on_cpu.step_s == pytest.approx(0.010 + 0.030 + 0.016 + 0.003)  # ready last: delays no compute


def test_the_best_plan_merges_if_messages_are_expensive() -> None:
    profile = make_profile([0.1] * 6, [30, 25, 20, 15, 10, 5], cost=LinearCost(1e-5, 1e-9))
    caps = by_cap(profile)
    scene = Scene(algorithm="ring")
    near, far = (make_point(profile, PRESETS["eth1"], n, scene, caps) for n in (2, 4096))
    assert not near.is_worth_changing
    assert len(far.best.buckets) == 1 and far.gain > 0.5 and far.is_worth_changing
    assert far.gain == pytest.approx(1 - far.best.step_s / far.recorded.step_s)


@given(ANY_PROFILE, ANY_LINK, st.sampled_from([1, 2, 64, 4096]), st.sampled_from([1, 8]))
def test_the_best_plan_is_never_worse(profile: StepProfile, link: Link, world_size: int, ranks_per_host: int) -> None:
    point = make_point(profile, link, world_size, Scene(ranks_per_host), by_cap(profile))
    assert point.best.step_s <= min(point.recorded.step_s, point.capped.step_s) and 0 <= point.gain < 1
    assert sorted(i for bucket in point.best.buckets for i in bucket) == sorted(profile.order)


def test_overhead_is_added_to_every_step() -> None:
    lean, fat = make_profile(), replace(make_profile(), overhead_s=0.5)
    for world_size in (1, 2, 64):
        before, after = (predict(profile, PRESETS["eth10"], world_size) for profile in (lean, fat))
        expected = pytest.approx((before.step_s + 0.5, before.compute_s + 0.5))
        assert (after.step_s, after.compute_s) == expected, world_size
        assert after.exposed_s == before.exposed_s, world_size


def test_the_model_error_compares_the_predicted_with_the_measured_step() -> None:
    assert model_error(make_profile(step_s=0.042)) == pytest.approx(0, abs=1e-9)
    assert model_error(make_profile(step_s=0.084)) == pytest.approx(-0.5)
    assert model_error(make_profile(step_s=0.042, world_size=1)) is None
    assert model_error(make_profile()) is None  # no step was measured
    assert make_profile().gradient_bytes == 7 * MB
