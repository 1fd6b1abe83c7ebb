"""`torchddp simulate`: its output, files and errors."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import torchddp
from tests.simulated import make_profile, with_host
from tests.unit.helpers import assert_refused
from torchddp.cli.app import app
from torchddp.harness.command import run_app
from torchddp.plan.step_profile import LinearCost

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
    return run_app(app, "torchddp", ["simulate", *arguments])


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command with these arguments and return its output."""

    def run(*arguments: str) -> str:
        assert simulate([*arguments]) == 0
        return capsys.readouterr().out

    return run


def test_by_default_all_links_and_powers_of_two_are_shown(profile, shown):
    out = shown(profile)
    for name in ("measured", "ib400", "eth100", "eth10", "eth1"):
        assert re.search(rf"^{name} · ", out, re.MULTILINE), out
        assert re.search(rf"^{name}, 4096 ranks: ", out, re.MULTILINE), out
    assert re.findall(ROW, out, re.MULTILINE) == 5 * ["2", "1", *(str(2**power) for power in range(2, 13))]
    # The last of six messages takes 0.2 ms; it starts late because each of the others took 0.06 ms of CPU.
    assert "warning: The model predicts 40.5 ms for the recorded step, which took 50.0 ms (-19.0%)." in out
    assert out.index("warning: The model ") < out.index("measured · ")
    assert re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d UTC$", out, re.MULTILINE)


def recorded(path: Path, step_s: float, **changes: Any) -> str:
    """A profile of three ranks, for which the model predicts steps of 40 to 41 ms."""
    replace(make_profile(cost=LinearCost(1e-4, 1e-10), world_size=3, step_s=step_s), **changes).save(path)
    return str(path)


def test_missing_software_costs_and_slowed_messages_are_reported(tmp_path, shown):
    out = shown(recorded(tmp_path / "p.json", 0.040), "--link", "eth1")
    assert out.splitlines()[1].startswith("The model predicts ") and "warning" not in out
    assert "lacks the cost of the transport's software" in out
    out = shown(recorded(tmp_path / "p.json", 0.040, message_slowdown=5.0), "--link", "eth1")
    assert "Messages in a step took 5.0 times as long as messages alone" in out


@pytest.mark.parametrize("step_s", [0.100, 0.025])
def test_an_inaccurate_model_predicts_nothing_unless_forced(step_s, tmp_path, capsys, shown):
    profile, data = recorded(tmp_path / "p.json", step_s), tmp_path / "all.json"
    assert simulate([profile, "--json", str(data)]) == 3
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and not data.exists()
    assert "can be trusted. Record it again on an idle machine, or predict anyway with --force." in said.err
    assert "warning: The model predicts " in shown(profile, "--force", "--json", str(data))
    assert data.exists()


def test_the_profiles_own_number_of_ranks_comes_first(tmp_path, shown):
    out = shown(recorded(tmp_path / "p.json", 0.040), "--link", "measured", "--link", "eth1")
    assert re.findall(ROW, out, re.MULTILINE) == 2 * ["3", *(str(2**power) for power in range(13))]
    assert out.splitlines()[2].startswith("measured, 3 ranks: ")
    # For each link, first the profile's number of ranks, then the largest, without repetition.
    named = re.findall(r"^(\w+), (\d+) ranks: ", out, re.MULTILINE)
    assert named == [("measured", "3"), ("measured", "4096"), ("eth1", "3"), ("eth1", "4096")]


def test_tables_fit_the_terminal(profile, shown, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = shown(profile, "--ranks-per-host", "8", "--link", "100mbit,20ms", "--link", "nvlink")
    rows = [line for line in out.splitlines() if re.match(rf"ranks +ms|─|{ROW}", line)]
    assert len(rows) == 2 * 15 and max(len(row.rstrip()) for row in rows) <= 80


def test_the_advice_says_which_buckets_to_use(profile, shown):
    out = " ".join(shown(profile, "--link", "eth1", "--ranks", "1024").split())
    assert "eth1, 1024 ranks: use 1 bucket (0.600 MB in launch order) instead of 6 to save " in out
    assert 'bucket_cap_mb="auto" plans such buckets there, and bucket_cap_mb=0.5 gives ' in out
    out = shown(profile, "--link", "measured", "--ranks", "2")
    assert "measured, 2 ranks: keep the recorded plan (6 buckets)" in out
    assert "eth1, 1 rank: nothing is sent" in shown(profile, "--ranks", "1", "--link", "eth1")


def test_json_and_plot_hold_the_points_of_the_tables(profile, tmp_path, shown):
    data, png = tmp_path / "all.json", tmp_path / "plot.png"
    asked = ["--link", "eth10", "--link", "5gbit", "--link", "eth10", "--ranks", "64,2,64"]
    out = shown(profile, *asked, "--json", str(data), "--plot", str(png))
    document = json.loads(data.read_text())
    points = document["points"]
    assert document["date"] and document["verdict"].startswith("eth10, 2 ranks: ")
    assert [(p["link"]["name"], p["world_size"]) for p in points] == [
        ("eth10", 2),
        ("eth10", 64),
        ("5gbit", 2),
        ("5gbit", 64),
    ]
    assert document["gradients"] == [f"layer{i}.weight" for i in range(6)]
    for point in points:
        for plan in (point["recorded"], point["best"]):
            assert plan["step_s"] == pytest.approx(plan["compute_s"] + plan["exposed_s"])
            assert sorted(i for bucket in plan["buckets"] for i in bucket) == list(range(6))
    assert png.read_bytes().startswith(b"\x89PNG")
    rows = re.findall(r"^(\d+) +([\d.]+) +[\d.]+ +[\d.]+%", out, re.MULTILINE)
    expected = [(str(p["world_size"]), float(p["recorded"]["step_s"] * 1e3)) for p in points]
    assert [(ranks, float(step)) for ranks, step in rows] == [(r, pytest.approx(s, rel=5e-3)) for r, s in expected]
    assert all(f"wrote {path}" in out.replace("\n", "") for path in (data, png))


def test_ranks_on_one_host_use_the_inner_link(profile, tmp_path, shown):
    steps = []
    for inner in ("nvlink", "10mbit"):
        path = tmp_path / f"{inner}.json"
        asked = ["--link", "eth1", "--ranks", "4", "--ranks-per-host", "4", "--inner-link", inner]
        shown(profile, *asked, "--json", str(path))
        document = json.loads(path.read_text())
        scene = document["scene"]
        assert (scene["inner"]["name"], scene["ranks_per_host"]) == (inner, 4)
        steps.append(document["points"][0]["recorded"]["step_s"])
    assert steps[1] > 2 * steps[0]


def test_a_profile_of_one_rank_has_no_recorded_link(tmp_path, shown, capsys):
    path = tmp_path / "alone.json"
    make_profile(world_size=1).save(path)
    out = shown(str(path), "--ranks", "2")
    assert "measured ·" not in out and "Recorded with one rank" in out and "error is unknown" in out
    for link in ("measured", "1gbit"):  # a link without a latency uses the recorded one
        assert_refused(simulate, [str(path), "--link", link], "recorded with 1 rank", capsys)


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
        (["--links", "eth1"], "No such option"),
    ):
        assert_refused(simulate, [profile, *arguments], said, capsys)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**make_profile().to_dict(), "gradients": None}))
    assert_refused(simulate, [str(path)], "The profile is damaged", capsys)
    assert_refused(simulate, [str(tmp_path / "nowhere.json")], "Cannot read the profile", capsys)
    assert_refused(simulate, [], "Missing argument", capsys)


def test_a_missing_extension_points_to_the_doctor(profile, capsys, monkeypatch):
    monkeypatch.setattr(torchddp, "import_error", ImportError("built for another torch"))
    assert simulate([profile]) == 1
    assert "see `torchddp doctor`: built for another torch" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_an_output_on_a_full_disk_is_one_sentence(profile, option, capsys):
    assert simulate([profile, "--ranks", "2", option, "/dev/full"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: cannot write to '/dev/full': No space left on device"
