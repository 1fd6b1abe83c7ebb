"""The simulator: costs against closed forms, steps computed by hand, properties; the command `torchddp simulate`."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.simulated import MB, make_profile, with_host
from tests.unit.helpers import assert_refused
from torchddp.cli.app import make_app
from torchddp.cli.tune_run import DEFAULT_CAPS_MB, make_candidates
from torchddp.harness.command import run_app
from torchddp.harness.machine import new_document
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


def test_recorded_costs_are_scaled_to_other_world_sizes() -> None:
    (line,) = make_all_reduce(make_profile(world_size=2), MEASURED, 8, Scene()).lines
    # 14 steps instead of 2, 1.75 bytes moved instead of 1.
    assert (line.cost.alpha_s, line.cost.beta_s_per_byte) == pytest.approx((7e-3, 1.75e-9))


def test_links_are_parsed_by_name_and_by_rate() -> None:
    assert parse_link("ETH10") is PRESETS["eth10"] and parse_link("measured") is MEASURED
    assert parse_link("25gbit,16us") == Link("25gbit,16us", "as given", 25e9 / 8 * TCP, 16e-6)
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
    found = predict(make_profile(buckets=((2, 0), (1,))), MEASURED, 2)
    assert found.step_s == pytest.approx(0.010 + 0.030 + 0.006 + 0.003)
    assert found.buckets == ((2, 0), (1,))
    messages = [Message(10, 5, 4), Message(20, 3, 3), Message(30, 2, 1)]
    assert run_backward(30, messages, shared_cpu=False) == 32  # sent from 10 to 15, 20 to 23, 30 to 32
    assert run_backward(30, messages, shared_cpu=True) == 39  # from 10 to 15, 24 to 27, 37 to 39


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
    found = predict(profile, link, world_size, Scene(ranks_per_host, algorithm=algorithm))
    assert found.step_s >= found.compute_s and found.exposed_s >= 0 and 0 < found.efficiency <= 1
    assert found.step_s == pytest.approx(found.compute_s + found.exposed_s)
    assert found.exposed_s <= found.comm_s + 1e-12 or profile.device == "cpu"
    assert world_size > 1 or (found.step_s, found.efficiency) == (found.compute_s, 1.0)
    assert (found.comm_s == 0) == (world_size == 1)


def test_auto_chooses_from_the_algorithms_of_the_recorded_backend() -> None:
    small = make_profile([0.001] * 3)
    assert predict(small, PRESETS["eth10"], 4096).algorithm == "tree"
    assert predict(replace(small, device="cpu"), PRESETS["eth10"], 4096).algorithm == "ring"
    assert predict(small, PRESETS["eth10"], 64, Scene(8)).algorithm in ("hierarchical", "tree")
    assert predict(make_profile([500] * 3), PRESETS["eth10"], 4).algorithm == "ring"
    with pytest.raises(ArgumentError, match="There is no algorithm 'magic'"):
        predict(small, MEASURED, 2, Scene(algorithm="magic"))


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
    together = predict(replace(packed, buckets=((2, 0), (1,))), MEASURED, 2)
    assert together.comm_s == pytest.approx((1 + 5 * (1 + 2) + 1 + 2) / 1e3)
    on_cpu = predict(replace(packed, device="cpu", buckets=((2, 0), (1,))), MEASURED, 2)
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


def test_the_model_error_compares_the_predicted_with_the_measured_step() -> None:
    assert model_error(make_profile(step_s=0.042)) == pytest.approx(0, abs=1e-9)
    assert model_error(make_profile(step_s=0.084)) == pytest.approx(-0.5)
    assert model_error(make_profile(step_s=0.042, world_size=1)) is None
    assert model_error(make_profile()) is None  # no step was measured
    assert make_profile().gradient_bytes == 7 * MB


# Ranks, step, exposed, efficiency: the start of a table row.
ROW = r"^(\d+) +[\d.]+ +[\d.]+ +[\d.]+%"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "toy.json"
    ready = [30, 25, 20, 15, 10, 5]
    small = make_profile([0.1] * 6, ready, cost=LinearCost(1e-4, 1e-9), device="cpu", step_s=0.05)
    with_host(small, 0.4e-9, 2e-5).save(path)
    return str(path)


def simulate(arguments: list[str]) -> int:
    return run_app(make_app(), "torchddp", ["simulate", *arguments])


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command with these arguments and return its output."""

    def run(*arguments: str) -> str:
        assert simulate([*arguments]) == 0
        return capsys.readouterr().out

    return run


def test_a_narrow_terminal_loses_no_column(shown, profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert re.search(ROW, shown(profile, "--link", "eth1", "--ranks", "2,8"), re.MULTILINE)


def test_by_default_all_links_and_up_to_4096_ranks_are_shown(profile, shown):
    out = shown(profile)
    for name in ("measured", "ib400", "eth100", "eth10", "eth1"):
        assert re.search(rf"^{name} · ", out, re.MULTILINE), out
        assert re.search(rf"^{name}, 4096 ranks: ", out, re.MULTILINE), out
    assert re.findall(ROW, out, re.MULTILINE) == 5 * ["1", "2", "8", "64", "512", "4096"]
    # The last of six messages takes 0.2 ms; it starts late because each of the others took 0.06 ms of CPU.
    assert "warning: The model predicts 40.5 ms for the recorded step, which took 50.0 ms (-19.0%)." in out
    assert out.index("warning: The model ") < out.index("measured · ")
    assert re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d UTC$", out, re.MULTILINE)


def test_a_profile_of_a_busy_machine_is_doubted_above_the_tables(tmp_path, shown):
    path = tmp_path / "busy.json"
    profile = replace(make_profile(), message_slowdown=27.0)
    profile = replace(profile, step_s=predict(profile, MEASURED, profile.world_size).step_s)
    profile.save(path)
    out = shown(str(path))
    assert "Don't trust the predictions: messages in that step took 27.0 times as long as alone" in " ".join(
        out.split()
    )
    assert out.index("warning: The model ") < out.index("measured · ")


def test_shared_memory_is_not_predicted_for_other_hosts(tmp_path, shown, capsys):
    path = tmp_path / "shm.json"
    replace(make_profile(), transport="shm", step_s=0.0405).save(path)
    out = shown(str(path))
    assert re.findall(ROW, out[out.index("measured · ") : out.index("ib400 · ")], re.MULTILINE) == ["1", "2"]
    assert_refused(simulate, [str(path), "--link", "measured", "--ranks", "2,8"], "which reaches no other host", capsys)


def recorded(path: Path, step_s: float, **changes: Any) -> str:
    """A profile of three ranks, for which the model predicts steps of 40 to 41 ms."""
    replace(make_profile(cost=LinearCost(1e-4, 1e-10), world_size=3, step_s=step_s), **changes).save(path)
    return str(path)


@pytest.mark.parametrize("step_s", [0.100, 0.025])
def test_an_inaccurate_model_predicts_nothing_unless_forced(step_s, tmp_path, capsys, shown):
    profile, data = recorded(tmp_path / "p.json", step_s), tmp_path / "all.json"
    assert simulate([profile, "--json", str(data)]) == 3
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "can be trusted. Record it again on an idle machine, or predict anyway with --force." in said.err
    failed = json.loads(data.read_text())
    assert said.err == f"error: {failed['failures'][0]}\n" and failed["results"] == []
    assert "warning: The model predicts " in shown(profile, "--force", "--json", str(data))
    assert json.loads(data.read_text())["failures"] == []


def test_the_advice_says_which_buckets_to_use(profile, shown):
    out = " ".join(shown(profile, "--link", "eth1", "--ranks", "1024").split())
    assert "eth1, 1024 ranks: bucket_cap_mb=0.5 saves " in out and " ms (1 bucket instead of 6)." in out
    assert "No trees, because the profile was recorded over " in out
    assert "No trees" not in shown(profile, "--link", "eth1", "--algorithm", "tree")
    out = shown(profile, "--link", "measured", "--ranks", "2")
    assert "measured, 2 ranks: keep the recorded plan (6 buckets)" in out
    # Other links and numbers of ranks are named only if it should change there.
    assert shown(profile, "--ranks", "2,4").count("keep the recorded plan") == 1
    assert "eth1, 1 rank: nothing is sent" in shown(profile, "--ranks", "1", "--link", "eth1")


def test_json_and_plot_hold_the_points_of_the_tables(profile, tmp_path, shown):
    data, png = tmp_path / "all.json", tmp_path / "plot.png"
    asked = ["--link", "eth10", "--link", "5gbit", "--link", "eth10", "--ranks", "64,2,64"]
    out = shown(profile, *asked, "--json", str(data), "--plot", str(png))
    document = json.loads(data.read_text())
    (result,) = document["results"]
    points = result["points"]
    assert document.keys() == new_document("simulate", "", {}).keys() and document["kind"] == "torchddp simulate"
    assert document["date"] and document["verdict"].startswith("eth10, 2 ranks: ")
    drawn = [(p["link"]["name"], p["world_size"]) for p in points]
    assert drawn == [("eth10", 2), ("eth10", 64), ("5gbit", 2), ("5gbit", 64)]
    assert result["gradients"] == [f"layer{i}.weight" for i in range(6)]
    assert png.read_bytes().startswith(b"\x89PNG")
    rows = re.findall(r"^(\d+) +([\d.]+) +[\d.]+ +[\d.]+%", out, re.MULTILINE)
    expected = [(str(p["world_size"]), float(p["recorded"]["step_s"] * 1e3)) for p in points]
    assert [(ranks, float(step)) for ranks, step in rows] == [(r, pytest.approx(s, rel=5e-3)) for r, s in expected]
    assert all(f"wrote {path}" in out.replace("\n", "") for path in (data, png))


NO_LINKS = ["wifi", "", "10", "10gbit,", "10gbit,20", "gbit", "-1gbit", "10gbit 2us", "10gib,2us", "1gbit,2us,3us"]


def test_a_wrong_argument_is_refused_in_one_sentence(profile, tmp_path, capsys):
    for arguments, said in (
        (["--ranks", "2,5000"], "from 1 to 4096, not '2,5000'"),
        (["--ranks", "2,many"], "separated by commas, like 2,8,64, not '2,many'"),
        (["--ranks", ""], "not ''"),
        *((["--link", text], f"There is no link '{text}'") for text in NO_LINKS),
        (["--inner-link", "wire"], "There is no link 'wire'"),
        (["--link", "0gbit,2us"], "The link '0gbit,2us' carries nothing: its rate must be above 0."),
        (["--ranks-per-host", "0"], "must be 1 to 4096, not 0"),
        (["--algorithm", "magic"], "There is no algorithm 'magic'"),
        (["--json", "/nowhere/at/all.json"], "does not exist"),
        (["--plot", "/nowhere/plot.png"], "--plot: the folder '/nowhere' does not exist"),
        (["--plot", "/"], "must be a file"),
        (["--json", profile], f"Two arguments name the file '{profile}'."),
        (["--links", "eth1"], "No such option"),
    ):
        assert_refused(simulate, [profile, *arguments], said, capsys)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**make_profile().to_dict(), "gradients": None}))
    assert_refused(simulate, [str(path)], "The profile is damaged", capsys)
    assert_refused(simulate, [str(tmp_path / "nowhere.json")], "Cannot read the profile", capsys)
    assert_refused(simulate, [], "Missing argument", capsys)
