"""The cases `links` and `training`: emulated links, results from made-up times and losses, and tasks."""

import math
import os
import shutil
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import hosts
from benchmarks.cases import CASES, links, training
from benchmarks.training.curves import Point, arrival, smoothed, target_of
from benchmarks.training.race import REFERENCE
from benchmarks.training.tasks import TASKS
from tests.harness import each
from tests.simulated import make_profile, with_host
from tests.unit.benchmark_results import MODEL, by_name
from tests.unit.helpers import assert_refused, printed
from torchddp.bench import cli
from torchddp.harness.variants import TORCHDDP, Role, Variant, make_variants
from torchddp.plan.step_profile import LinearCost

MBIT, GBIT = 10**6, 10**9


# --- emulated hosts --------------------------------------------------------------------------------------------------


def test_rates_are_parsed_and_each_end_is_limited_before_it_is_up() -> None:
    texts = "host", "1gbit", "2.5Gbit", " 10mbit", "100gbit"
    places = [hosts.parse_place(text) for text in texts]
    assert places == [None, GBIT, 2_500_000_000, 10_000_000, 100 * GBIT]
    assert list(map(hosts.place_text, places[:3])) == ["one host", "1 Gbit/s", "2.5 Gbit/s"]
    for text in each(("", "1", "1kbit", "-1gbit", "9mbit", "101gbit", "1e3mbit", "nangbit")):
        with pytest.raises(ValueError, match="or a rate of 10mbit to 100gbit"):
            hosts.parse_place(text)
    lines = [" ".join(command) for command in hosts.setup_commands(hosts.make_hosts(77), GBIT)]
    for host in hosts.make_hosts(77):
        limit = f"tc -n {host.namespace} qdisc add dev slow0 root tbf rate 1000000000bit burst 125000 latency 50ms"
        assert lines.index(limit) < lines.index(f"ip -n {host.namespace} link set slow0 up")
    assert hosts.burst_bytes(10 * GBIT) == 1_250_000
    assert hosts.burst_bytes(10_000_000) == 64 * 1024


def test_the_emulated_network_needs_root_ip_and_tc(monkeypatch, capsys) -> None:
    for user, missing, command, words in (
        (1000, "", [], "as root."),
        (0, "ip", [], "'ip' was not found"),
        (0, "", ["/nowhere/ip"], "Cannot build the emulated network: "),
        (0, "", ["sh", "-c", "echo Operation not permitted. >&2; exit 2"], "said: Operation not permitted."),
    ):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        monkeypatch.setattr(shutil, "which", {"ip": "/sbin/ip", "tc": "/sbin/tc", missing: None}.get)
        monkeypatch.setattr(hosts, "setup_commands", lambda found, rate, command=command: [command])
        assert_refused(main, ["--case", "links", "--set", "place=1gbit"], words, capsys)


def main(arguments: list[str]) -> int:
    return cli.main(arguments, CASES)


def test_a_wrong_option_of_a_case_is_refused_with_what_is_allowed(monkeypatch, capsys) -> None:
    for arguments, words in (
        ("links --set place=fast", "--set place: must be 'host', or a rate of 10mbit to 100gbit"),
        ("links --set speed=1", "--set speed=1: must be NAME=VALUE with an option of links: place."),
        ("step_time --set place=host", "with an option of step_time: none."),
        ("links --world-size 3", "--world-size must be even for the case links"),
        ("links --ours torch.nn.parallel.DistributedDataParallel", "--ours: the case links plans torchddp's"),
        ("training --set methods=magic", "--set methods: there is no 'magic'; choose from torch-ddp, "),
        ("training --set seeds=0", "--set seeds: must be a whole number from 1 to 20, not '0'."),
    ):
        assert_refused(main, ["--case", *arguments.split()], words, capsys)
    monkeypatch.setattr(training.importlib.util, "find_spec", lambda name: None)
    assert_refused(main, ["--case", "training"], "The task digits needs scikit-learn", capsys)


# --- links -----------------------------------------------------------------------------------------------------------

PLANNED = Variant(links.PLANNED, Role.OURS, TORCHDDP, (("bucket_cap_mb", "auto"),))
VARIANTS = (*make_variants(TORCHDDP, (), (1, 25), ours_tuned=True), PLANNED)


def at_place(rate: int | None, step_ms: dict[str, float]) -> dict[str, Any]:
    """A result from steps without noise."""
    steps = np.array([[step_ms.get(variant.name, 50.0)] * 9 for variant in VARIANTS])
    sent = rate and [[1e6] * len(VARIANTS), [2e6] * len(VARIANTS)]
    raw = {**MODEL, "transport": "c10d", "buckets": 3, "sent_bytes": sent, "step_ms": steps}
    return links.place_result(VARIANTS, raw, 2, rate)


def test_planned_buckets_are_compared_with_the_best_of_the_sweep() -> None:
    result = at_place(GBIT, {links.PLANNED: 40.0, "torchddp tuned, cap 1": 44.0, "torch default": 30.0})
    assert result["best_of_sweep"] == "torchddp tuned, cap 1" and result["best_torch"] == "torch default"
    assert result["planned_to_best"]["median"] == pytest.approx(40 / 44)
    rows = by_name(result["variants"])
    assert rows[links.PLANNED]["ratio_to_best_torch"]["median"] == pytest.approx(4 / 3)
    assert rows[links.PLANNED]["sent_bytes"] == [1e6, 2e6]
    text = printed(links.table(result)) + printed(links.summary([{**result, "predictions": []}])[0])
    assert all(variant.name in text for variant in VARIANTS) and "cap 1 " in text and " 2.00 " in text


def test_each_link_is_predicted_from_the_others() -> None:
    rates = (GBIT, 100 * MBIT, None)
    costs = (LinearCost(0.0, 1e-9 if rate is None else 8 / rate / links.PAYLOAD_SHARE) for rate in rates)
    profiles = [with_host(make_profile(device="cpu", cost=cost), 1e-10) for cost in costs]
    results = [at_place(rate, {links.OUR_DEFAULT: 100.0}) for rate in rates]
    for result in results:
        result["predictions"] = links.predictions(result, results, profiles)
    (fast,), (slow,), none = (result["predictions"] for result in results)
    assert (fast["recorded_over"], slow["recorded_over"], none) == ("100 Mbit/s", "1 Gbit/s", [])
    assert slow["predicted_ms"] > 5 * fast["predicted_ms"]
    assert fast["error"] == pytest.approx(fast["predicted_ms"] / 100.0 - 1)
    assert "100 Mbit/s" in printed(links.summary(results)[1])


# --- training --------------------------------------------------------------------------------------------------------


def run_of(*losses: float, step_s: float = 1.0) -> dict[str, Any]:
    """A run that evaluates every five steps."""
    points = [[5 * index, 5 * index * step_s, loss] for index, loss in enumerate(losses)]
    return {"points": points, "step_seconds": [step_s] * (len(losses) - 1), "bytes_per_step": 2e7}


def result_of(*races: dict[str, dict[str, Any]], steps: int = 15, target: float = 3.0) -> dict[str, Any]:
    told = {"task": "gpt", "title": "GPT", "unit": "tokens", "units_per_step": 1024, "steps": steps, "parameters": 9}
    return training.task_result({**told, "races": [{"target": target, "methods": race} for race in races]}, 2, None)


def test_ratios_are_per_seed_and_a_methods_bound_applies_to_their_mean() -> None:
    races = [
        {
            REFERENCE: run_of(5.0, 4.0, 3.0, their),
            "int8": run_of(5.0, 4.0, 3.0, our),
            "int4": run_of(5.0, 4.0, 3.0, our),
        }
        for their, our in ((2.0, 2.2), (4.0, 3.6))
    ]
    row = by_name(result_of(*races)["methods"])["int8"]
    assert row["ratio"] == pytest.approx({"mean": 1.0, "low": 0.9, "high": 1.1})
    assert row["loss"] == pytest.approx(2.9) and row["bytes_per_step"] == 2e7
    for loss, style in ((2.0199, "green"), (2.0201, "red")):
        race = {name: run_of(5.0, 4.0, 3.0, 2.0 if name == REFERENCE else loss) for name in (REFERENCE, "int8", "int4")}
        rows = by_name(result_of(race)["methods"])
        assert training.ratio_cell(rows["int8"]).style == style
        assert training.ratio_cell(rows["int4"]).style == ""  # has no bound


def test_a_method_is_reported_with_its_speedup_or_its_error() -> None:
    losses = 6.0, 5.0, 4.0, 3.0, 2.5
    race = {
        REFERENCE: run_of(*losses, step_s=2.0),
        "torch-ddp-5": run_of(*losses, step_s=1.8),
        "exact": run_of(*losses, step_s=0.5),
        "int4": run_of(6.0, 5.0, 5.0, 5.0, 5.0),
        "int8": run_of(6.0, 5.0, math.nan, 3.0, 2.5),
        "diloco": {"error": "ImportError: no averaging"},
    }
    result = result_of(race)
    rows = by_name(result["methods"])
    assert rows[REFERENCE]["arrival"] == {"steps": 15.0, "seconds": 30.0}
    assert rows["exact"]["speedup"] == pytest.approx(1.8 / 0.5)  # the faster of torch's
    assert rows["int4"]["arrival"] is None and rows["int4"]["speedup"] is None
    assert rows["int8"]["error"] == "the loss is not finite"
    text = printed(training.table(result))
    assert "no averaging" in text and "20.0 MB" in text


def curve(*losses: float, step_s: float = 1.0) -> list[Point]:
    """A curve with an evaluation after each slice."""
    return [Point(*point) for point in run_of(*losses, step_s=step_s)["points"]]


def test_the_time_to_a_loss_is_interpolated_between_smoothed_evaluations() -> None:
    falling = curve(6.0, 5.0, 4.0, 3.0, 2.0, step_s=2.0)
    assert [arrival(falling, loss) for loss in (4.0, 3.5, 6.0)] == [(10, 20), (12.5, 25), (0, 0)]
    assert target_of(falling) == 3.0
    # Only the last evaluation is at 2.0, which may be noise.
    assert arrival(curve(6.0, 5.0, 4.0, 3.0, 2.0), 2.5) is None
    assert arrival(curve(6.0, 5.0, 4.0, 3.0, 2.0, 1.0), 2.5) == (17.5, 17.5)
    lucky = curve(6.0, 5.0, 1.0, 5.0, 4.0, 3.0, 2.0)
    assert smoothed(lucky) == [6.0, 5.0, 5.0, 4.0, 4.0, 3.0]
    assert arrival(lucky, 3.5) == (22.5, 22.5)
    nan = float("nan")
    assert arrival(curve(6.0, nan, nan, nan, nan), 4.0) is None
    with pytest.raises(ValueError, match="needs 3 evaluations, got 2"):
        target_of(curve(6.0, 5.0))


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_task_is_a_function_of_seed_step_and_rank(name: str) -> None:
    if name == "digits":
        pytest.importorskip("sklearn")
    task, again = TASKS[name](), TASKS[name]()
    inputs, targets = task.batch(3, 5, 1, 2)
    assert all(map(torch.equal, (inputs, targets), again.batch(3, 5, 1, 2)))
    for other in ((4, 5, 1), (3, 6, 1), (3, 5, 0)):
        assert not torch.equal(inputs, task.batch(*other, 2)[0]), other
    first, second = task.make_model(1), again.make_model(1)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    # Two ranks' parts of the evaluation set have equal sizes, are disjoint, and cover the set.
    (whole,), parts = task.held_out(0, 1), [task.held_out(rank, 2)[0] for rank in range(2)]
    assert len(parts[0][0]) == len(parts[1][0]) == len(whole[0]) / 2
    both = [first(*part).item() for part in parts]
    assert both[0] != both[1] and sum(both) / 2 == pytest.approx(first(*whole).item(), rel=1e-5)
