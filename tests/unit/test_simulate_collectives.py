"""Costs of all-reduce algorithms against their closed forms, and what a profile says of hops."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulated import make_profile, with_host
from torchddp.plan.step_profile import LinearCost
from torchddp.simulate.network import (
    ALGORITHMS,
    DOUBLING,
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
from torchddp.simulate.predict import make_all_reduce

# alpha 10 us, beta 1 ns per byte between hosts; 1 us, 0.01 ns inside.
OUTER = Hop(10e-6, 1e-9, 0.0, 0.0)
INNER = Hop(1e-6, 1e-11, 0.0, 0.0)
# What TCP leaves of an Ethernet frame.
TCP = 1448 / 1538


def lines(algorithm: str, world_size: int, ranks_per_host: int = 1) -> list[Line]:
    return all_reduce_lines(algorithm, Layout(world_size, ranks_per_host), OUTER, INNER, (RING, TREE))


def test_closed_forms() -> None:
    for algorithm, world_size, ranks_per_host, alpha_us, beta_ns in (
        (RING, 2, 1, 20, 1.0),
        (RING, 4, 1, 60, 1.5),
        (RING, 4, 4, 6, 0.015),  # one host: its own link
        (RING, 8, 4, 14 * (10 + 3 * 1) / 4, 1.75),  # one step of four crosses between hosts
        (DOUBLING, 8, 1, 30, 3.0),
        (DOUBLING, 6, 1, 40, 4.0),  # 2 + 2 rounds
        (DOUBLING, 8, 4, 2 * 1 + 10, 2 * 0.01 + 4 * 1.0),  # four ranks send at once through one link
    ):
        (line,) = lines(algorithm, world_size, ranks_per_host)
        expected = pytest.approx((alpha_us * 1e-6, beta_ns * 1e-9))
        assert (line.cost.alpha_s, line.cost.beta_s_per_byte) == expected, (algorithm, world_size, ranks_per_host)


def test_a_tree_is_a_line_for_each_number_of_blocks() -> None:
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


def test_a_tree_over_hosts_goes_on_as_a_chain_inside_them() -> None:
    flat, on_hosts = lines(TREE, 4)[0].cost, lines(TREE, 32, 8)[0].cost
    assert on_hosts.alpha_s - flat.alpha_s == pytest.approx(2 * 7 * 1e-6)
    assert on_hosts.beta_s_per_byte - flat.beta_s_per_byte == pytest.approx(7 * 1e-11)


def test_hierarchical_is_the_sum_of_its_levels() -> None:
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
def test_the_least_line_is_found(costs: list[tuple[float, float]], sizes: list[float]) -> None:
    all_reduce = AllReduce([Line(str(i), LinearCost(*c)) for i, c in enumerate(costs)])
    for nbytes in sizes:
        least = min(alpha + nbytes * beta for alpha, beta in costs)
        assert all_reduce.best(nbytes).cost.seconds(nbytes) == pytest.approx(least, rel=1e-9, abs=1e-12)
    between = all_reduce.lines_between(min(sizes), max(sizes))
    assert {all_reduce.best(nbytes).algorithm for nbytes in sizes} <= {line.algorithm for line in between}


@given(
    st.sampled_from(ALGORITHMS[1:]), st.integers(2, 4096), st.integers(1, 16), st.floats(0, 1e-4), st.floats(0, 1e-8)
)
def test_cpu_time_is_part_of_the_time(algorithm, world_size, ranks_per_host, step_s, s_per_byte):
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
    # Measured with two ranks: one byte moved a byte, two steps; but no more than the recorded cost.
    volume, steps = 2 * (world_size - 1) / world_size, 2 * (world_size - 1)
    host = (min(1e-9, volume * 0.4e-9), min(1e-3, steps / 2 * 2e-4)) if device == "cpu" else (0.0, 0.0)
    (line,) = make_all_reduce(profile, MEASURED, Layout(world_size)).lines
    found = (line.cost.alpha_s, line.cost.beta_s_per_byte, line.cost.host_s_per_byte, line.cost.host_s_per_message)
    assert found == pytest.approx((1e-3, 1e-9, *host))


def test_the_recorded_cost_is_scaled_to_other_numbers_of_ranks() -> None:
    (line,) = make_all_reduce(make_profile(world_size=2), MEASURED, Layout(8)).lines
    # 14 steps instead of 2, 1.75 bytes moved instead of 1.
    assert (line.cost.alpha_s, line.cost.beta_s_per_byte) == pytest.approx((7e-3, 1.75e-9))


def test_a_slow_link_sets_the_pace_and_over_a_fast_one_the_cpu_does() -> None:
    profile = with_host(make_profile(device="cpu"), 0.4e-9, 2e-4)
    slow, fast = (make_hop(profile, parse_link(text)) for text in ("100mbit", "400gbit,5us"))
    assert slow.s_per_byte == pytest.approx(80e-9 / TCP) and slow.step_s == pytest.approx(0.5e-3)  # latency as recorded
    assert fast.s_per_byte == pytest.approx(0.4e-9) and fast.step_s == pytest.approx(5e-6 + 1e-4)
    hop = make_hop(with_host(make_profile(device="cuda"), 1e-9, 1e-3), Link("l", "l", 1e10, 1e-6))
    assert hop == Hop(1e-6, 1e-10, 0.0, 0.0)


def test_the_recorded_link_takes_no_more_cpu_than_time_and_others_take_what_tcp_does() -> None:
    # A profile of shared memory, say: faster than TCP.
    profile = with_host(make_profile(device="cpu"), 5e-9, 1e-2)
    recorded, other = make_hop(profile, MEASURED), make_hop(profile, parse_link("400gbit,0us"))
    assert recorded.s_per_byte == pytest.approx(1e-9) and recorded.step_s == pytest.approx(0.5e-3)
    assert other.s_per_byte == pytest.approx(5e-9) and other.step_s == pytest.approx(5e-3)
    assert make_hop(profile, parse_link("1gbit")).step_s == pytest.approx(5e-3)


def test_links_by_name_and_by_rate() -> None:
    assert parse_link("ETH10") is PRESETS["eth10"] and parse_link("measured") is MEASURED
    assert parse_link("25gbit,16us") == Link("25gbit,16us", "25gbit, 16us", 25e9 / 8 * TCP, 16e-6)
    spaced = parse_link("2.5 Mbit , 1ms")
    assert (spaced.bytes_per_s, spaced.latency_s) == pytest.approx((2.5e6 / 8 * TCP, 1e-3))
    assert parse_link("1tbit").latency_s is None
    rates = [link.bytes_per_s or 0 for link in PRESETS.values()]
    assert rates == sorted(rates, reverse=True)
