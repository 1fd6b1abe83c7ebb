"""`torchddp tune`: what is tried, what is chosen, what is shown, and what is refused."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from torchddp.cli.app import app
from torchddp.cli.tune import answer, draw_curve, page_sections, tune_table
from torchddp.cli.tune_run import TuneResult, choose, make_candidates, predicted_ms, tune_document
from torchddp.harness.command import run_app
from torchddp.harness.page import make_page
from torchddp.plan.plan_cache import PlanKey, load_plan
from torchddp.plan.step_profile import Gradient, LinearCost, StepProfile, load_profile

MIB = 1024 * 1024


def profile(alpha_s: float = 1e-3, beta_s_per_byte: float = 1e-9) -> StepProfile:
    """Four gradients of a MiB each, 10 ms apart."""
    return StepProfile(
        model="test",
        fingerprint="0123",
        world_size=2,
        ranks_per_host=2,
        transport="c10d",
        device="cpu",
        gradients=tuple(Gradient(f"p{i}", MIB // 4, 4, 0, 0, False, (4 - i) * 0.01) for i in range(4)),
        order=(3, 2, 1, 0),
        forward_s=0.02,
        backward_s=0.04,
        cost=LinearCost(alpha_s, beta_s_per_byte),
        buckets=((3,), (2, 1, 0)),
        step_s=0.07,
        torchddp_version="0",
        torch_version="0",
    )


def test_candidates_are_the_default_the_plan_and_sizes_up_to_one_bucket() -> None:
    candidates = make_candidates(profile(), (100, 1, 2, 25))
    assert [c.name for c in candidates] == ["default", "planned", "1 MiB", "2 MiB", "25 MiB"]
    assert [len(c.buckets) for c in candidates][2:] == [4, 2, 1]
    assert candidates[0].buckets == profile().buckets and candidates[0].argument == ""
    assert candidates[3].argument == "bucket_cap_mb=2"


def test_a_prediction_is_forward_and_the_last_bucket() -> None:
    one = make_candidates(profile(), (100,))[2]
    assert predicted_ms(profile(), one) == pytest.approx(20 + 40 + 1 + 4 * MIB * 1e-6)
    assert predicted_ms(profile(0.0, 0.0), one) == pytest.approx(60)


def noisy(median: float, rounds: int = 40, noise: float = 0.5) -> np.ndarray:
    return median + noise * np.sin(np.arange(rounds) * 2.3)


def test_the_fastest_is_chosen_only_if_it_is_told_apart() -> None:
    candidates = make_candidates(profile(), (1, 2))
    clear = np.stack([noisy(100), noisy(99), noisy(80), noisy(90)])
    assert candidates[choose(clear, candidates)].name == "1 MiB"
    shuffled = np.stack([noisy(80, noise=1), noisy(100), np.roll(noisy(79.99, noise=1), 7), noisy(90)])
    assert candidates[choose(shuffled, candidates)].name == "default"


def result() -> TuneResult:
    candidates = make_candidates(profile(), (1, 2, 25))
    return TuneResult(profile(), candidates, np.stack([noisy(100), noisy(70), noisy(90), noisy(95), noisy(110)]))


def test_the_document_holds_what_is_shown() -> None:
    document = tune_document(result())
    assert json.loads(json.dumps(document, allow_nan=False))["candidates"] == document["candidates"]
    assert [row["chosen"] for row in document["candidates"]] == [False, True, False, False, False]
    assert document["argument"] == 'bucket_cap_mb="auto"'
    assert (
        answer(document)
        == 'DistributedDataParallel(model, bucket_cap_mb="auto") (30% less time a step than the default)'
    )
    console = Console(file=io.StringIO(), width=80)
    console.print(tune_table(document))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) <= 80
    assert all(row["name"] in shown for row in document["candidates"])
    figure = draw_curve(document)
    assert {text.get_text() for text in figure.axes[0].get_xticklabels()} == {"1", "2", "25"}
    page = make_page("tune", page_sections(document), ["here"])
    assert all(f"<td>{row['name']}</td>" in page for row in document["candidates"])
    assert page.count("data:image/png;base64,") == 1


def test_the_default_is_an_answer_too() -> None:
    candidates = make_candidates(profile(), (1,))
    document = tune_document(TuneResult(profile(), candidates, np.stack([noisy(70), noisy(80), noisy(90)])))
    assert answer(document).startswith("Leave bucket_cap_mb out")


def run_tune(*arguments: str) -> int:
    return run_app(app, "torchddp", ["tune", *arguments])


@pytest.mark.thorough
def test_a_run_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHDDP_CACHE_DIR", str(tmp_path / "cache"))
    paths = {f"--{name}": tmp_path / f"t.{name}" for name in ("json", "html", "plot", "profile")}
    written = [text for option, path in paths.items() for text in (option, str(path))]
    assert run_tune("--model", "mlp", "--seconds", "0.2", "--caps", "4,25", *written) == 0, capsys.readouterr().err
    document = json.loads(paths["--json"].read_text())["results"][0]
    assert [row["name"] for row in document["candidates"]][:3] == ["default", "planned", "4 MiB"]
    found = load_profile(paths["--profile"])
    assert found.gradient_bytes == document["gradient_bytes"] == 6 * (1024 * 1024 + 1024) * 4
    assert found.step_s > 0 and found.cost.beta_s_per_byte > 0
    (kept,) = (tmp_path / "cache").iterdir()
    key = PlanKey(found.fingerprint, 2, 2, found.transport, "gloo")
    buckets = load_plan(kept, key)
    assert kept == key.path
    chosen = next(row for row in document["candidates"] if row["chosen"])
    assert buckets is not None and len(buckets) == chosen["buckets"]
    assert paths["--plot"].read_bytes().startswith(b"\x89PNG")
    assert str(kept) in capsys.readouterr().out


@pytest.mark.rest_is_thorough("arguments[015-9]*")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nothing"], "There is no model 'nothing'"),
        (["--model", "no.such.package:make"], "cannot import 'no.such.package'"),
        (["--model", "tests.models:missing"], "no function or class named 'missing'"),
        (["--model", "tests.unit.test_tune:broken_factory"], "the factory raised ValueError: out of luck"),
        (["--model", "tests.unit.test_tune:wrong_factory"], "the factory returned a int"),
        (["--world-size", "1"], "With one rank there is nothing to synchronise"),
        (["--world-size", "0"], "--world-size"),
        (["--caps", "a"], "--caps wants numbers"),
        (["--seconds", "0"], "--seconds"),
        (["--transport", "pigeon"], "pigeon"),
        (["--transport", "nccl"], "--transport nccl: "),
        (["--plot", "/nowhere/x.png"], "folder '/nowhere' does not exist"),
        (["--what"], "No such option"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_tune(*arguments) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and printed.out.strip() == ""


def broken_factory() -> None:
    raise ValueError("out of luck")


def wrong_factory() -> int:
    return 3


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tune("--help") == 0
    assert "torchrun --nnodes 2" in capsys.readouterr().out
