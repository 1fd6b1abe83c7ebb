"""The benchmark on two emulated hosts: its network, rates, results and report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.two_hosts import network, report, results
from tests.harness import each
from tests.unit.benchmark_results import MODEL, document
from tests.unit.helpers import printed
from torchddp.harness.variants import TORCHDDP, ArgumentError, Role, Variant, make_variants

GBIT = 1_000_000_000


def test_rates_are_parsed_and_each_end_is_limited_before_it_is_up() -> None:
    texts = "1gbit", "2.5Gbit", " 10mbit", "100gbit"
    assert [network.parse_rate(text) for text in texts] == [GBIT, 2_500_000_000, 10_000_000, 100 * GBIT]
    for text in each(("", "1", "1kbit", "-1gbit", "9mbit", "101gbit", "1e3mbit", "nangbit")):
        with pytest.raises(ArgumentError, match="--rate must be 10mbit to 100gbit"):
            network.parse_rate(text)
    lines = [" ".join(command) for command in network.setup_commands(network.make_hosts(77), GBIT)]
    for host in network.make_hosts(77):
        limit = f"tc -n {host.namespace} qdisc add dev slow0 root tbf rate 1000000000bit burst 125000 latency 50ms"
        assert lines.index(limit) < lines.index(f"ip -n {host.namespace} link set slow0 up")
    assert network.burst_bytes(10 * GBIT) == 1_250_000
    assert network.burst_bytes(10_000_000) == 64 * 1024


def field(transport: str = "auto") -> tuple[Variant, ...]:
    return results.with_transport(make_variants(TORCHDDP, (), (1, 100)), transport)


def test_a_transport_is_passed_only_to_torchddp_and_defaults_to_auto() -> None:
    assert field() == make_variants(TORCHDDP, (), (1, 100))
    (ours,) = (variant for variant in field("c10d") if variant.role is Role.OURS)
    assert (ours.name, ours.keywords) == ("torchddp, c10d", {"transport": "c10d"})
    assert all("transport" not in variant.keywords for variant in field("c10d") if variant.role is not Role.OURS)


def fake_result(transport: str = "auto", ours_ms: float = 75.0) -> dict[str, Any]:
    """A local step of 20 ms; torch 120, 100, 110; each byte once over the link with ours, one and a half with torch."""
    step_ms = np.array([20.0, 120.0, 100.0, 110.0, ours_ms])[:, None] + np.zeros((1, 30))
    by_host = [0.0, 150e6, 150e6, 150e6, 100e6]
    raw = {**MODEL, "gradient_bytes": 10**8, "step_ms": step_ms, "sent_bytes": [by_host] * 2, "transport": "c10d"}
    return results.two_hosts_result(field(transport), raw)


def test_ratios_compare_whole_steps_and_the_report_says_whether_the_goal_is_met() -> None:
    result = fake_result()
    local, *_, ours = result["variants"]
    assert result["best_torch"] == "torch tuned, cap 1" and "ratio_to_best_torch" not in local
    assert (ours["ratio_to_best_torch"]["median"], ours["cost"]["median"]) == pytest.approx((0.75, 55.0))
    assert ours["sent_bytes"] == [100e6, 100e6]
    text = printed(report.render(document(result) | {"settings": {"rate": GBIT}}))
    assert all(variant.name in text for variant in field())
    assert "0.75 [0.75..0.75], goal 0.75 met" in text
    assert "sent by a host: ours 1.00 x the gradients, torch's best 1.50 x\n" in text
    assert "goal 0.75 missed" in str(report.verdict(fake_result(ours_ms=99.0)))
