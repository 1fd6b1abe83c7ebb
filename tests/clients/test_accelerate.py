"""Accelerate and the Trainer with our engine: bitwise equal to torch's class, on two ranks under torchrun."""

import inspect
import json
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="accelerate and transformers are not installed: make test-clients")

import accelerate
from accelerate.state import AcceleratorState, GradientState, PartialState

import torchddp
from tests.clients.common import assert_has_the_losses_of_its_page, launch, saved_by_ranks
from tests.harness import assert_each_raises
from tests.pages import code_of, common_last_step, signalled
from torchddp.integrations.accelerate import TorchDDPKwargs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.beyond_torch("is not tested here")]
pytestmark += [pytest.mark.usefixtures("alone")]


class Results:
    """Results by job and class: "torch" and "ours"."""

    def __init__(self, module: str, folder: Path) -> None:
        self.ranks = saved_by_ranks(module, folder, ranks=2, timeout_s=380)

    def ours(self, job: str, rank: int = 0) -> Any:
        return self.ranks[rank][job]["ours"]

    def torchs(self, job: str, rank: int = 0) -> Any:
        return self.ranks[rank][job]["torch"]

    def assert_same(self, job: str, steps: int) -> None:
        """Assert bitwise equal results of both classes, equal weights on both ranks, and ``steps`` steps by ours."""
        for rank in range(2):
            torchs = self.torchs(job, rank)
            assert (torchs["class"], torchs["steps"]) == ("torch", 0)
            assert self.ours(job, rank) == {**torchs, "class": "torchddp", "steps": steps}, f"rank {rank}"
        assert self.ours(job, 0)["weights"] == self.ours(job, 1)["weights"]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate in this process."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_the_signature_lists_the_options() -> None:
    listed = inspect.signature(TorchDDPKwargs).parameters
    of_the_class = inspect.signature(torchddp.DistributedDataParallel).parameters
    assert of_the_class.keys() - listed.keys() == {"module", "device_ids", "output_device"}
    TorchDDPKwargs(**{name: parameter.default for name, parameter in listed.items()})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results("tests.clients.transformers_jobs", tmp_path_factory.mktemp("accelerate"))


@pytest.mark.parametrize(
    ("job", "steps"),
    [
        ("plain", 10),
        ("accumulation", 6),  # five batches in each of two epochs; an epoch's last batch ends a step
        ("bf16", 10),
        ("torchs_options", 10),
        ("fp16_hook", 10),
        ("power_sgd_hook", 10),
        ("compiled", 10),
        ("own_options", 10),
        ("static_graph_accumulation", 6),
        ("local_sgd", 5),
        ("synced_late", 1),
        # Including losses and norms; twelve microbatches are reduced six times.
        ("trainer", 6),
        ("trainer_bf16", 6),
        ("trainer_unused", 6),
        ("trainer_unused_by_default", 6),
        ("trainer_own_options", 6),
    ],
)
def test_training_is_bitwise_equal_to_torchs_class(results: Results, job: str, steps: int) -> None:
    results.assert_same(job, steps)


def test_options_have_an_effect(results: Results) -> None:
    plain = results.torchs("plain")["weights"]
    for job in ("accumulation", "bf16", "torchs_options", "fp16_hook", "power_sgd_hook"):
        assert results.ours(job)["weights"] != plain, job
    assert not results.ours("trainer_bf16")["finds unused"]
    assert results.ours("trainer_unused")["finds unused"] and results.ours("trainer_unused_by_default")["finds unused"]
    assert results.ours("local_sgd")["steps inside"] == 0


def test_hooks_that_torchs_class_lacks_on_cpu(results: Results) -> None:
    by_rank = [
        {**results.ours("named_hooks", rank), "trainer": results.ours("trainer_hook", rank)} for rank in range(2)
    ]
    first, second = ({name: hook["weights"] for name, hook in hooks.items()} for hooks in by_rank)
    assert first == second
    plain, trainers = results.ours("plain")["weights"], results.ours("trainer")["weights"]
    assert len({*first.values(), plain, trainers}) == 6
    assert {name: hook["steps"] for name, hook in by_rank[0].items()} == {
        "bf16": 10,
        "named": 10,
        "int8": 10,
        "trainer": 6,
    }


@pytest.mark.parametrize(("job", "steps"), [("states", 2), ("checkpoints", 3)])
def test_each_class_resumes_from_what_either_saved(results: Results, job: str, steps: int) -> None:
    for rank in range(2):
        for saved in (results.ours(job, rank), results.torchs(job, rank)):
            uninterrupted, *resumed = saved.values()
            assert [end["weights"] for end in resumed] == [uninterrupted["weights"]] * 2
            assert [end["steps"] for end in resumed] == [0, steps]


def test_wrong_options_are_named() -> None:
    """By the class's own checks, before the model is wrapped."""
    assert_each_raises(
        (lambda: TorchDDPKwargs(transprot="shm"), TypeError, "argument 'transprot'. Did you mean 'transport'"),
        (lambda: TorchDDPKwargs(device_ids=[0]), TypeError, "'device_ids': use the device that Accelerate chooses"),
        (lambda: TorchDDPKwargs(transport="smoke signals"), ValueError, "transport must be"),
        (lambda: TorchDDPKwargs(comm_hook="fp12"), ValueError, "comm_hook must be one of"),
        (TorchDDPKwargs().to_kwargs, RuntimeError, "call torchddp.install() first"),
    )


def test_options_are_passed_on_as_they_are() -> None:
    options: dict[str, Any] = {"gradient_as_bucket_view": False, "weighted": True, "timeout": timedelta(seconds=5)}
    with torchddp.install():
        assert TorchDDPKwargs(**options).to_kwargs() == options
        accelerator = accelerate.Accelerator(kwargs_handlers=[TorchDDPKwargs(comm_hook="int8")])
    assert isinstance(accelerator.ddp_handler, TorchDDPKwargs)


def ours_and_torchs(*arguments: str, own: tuple[str, ...] = (), steps: int) -> dict[str, Any]:
    """Run an example with both classes; assert that the last output is equal, and return it."""
    found = []
    for options, reduced in ((own, steps), (("--torch-ddp",), 0)):
        printed = launch(*arguments, *options, ranks=2).stdout
        ends = [json.loads(text) for text in re.findall(r"\{[^{}]*reduced_steps[^{}]*\}", printed)]  # one line or two
        assert len(ends) == 2 and ends[0] == ends[1], printed[-2000:]
        assert ends[0].pop("reduced_steps") == reduced
        found.append(ends[0])
    assert found[0] == found[1]
    return found[0]


def test_train_accelerate() -> None:
    assert ours_and_torchs("examples/train_accelerate.py", steps=3 * 32)["accuracy"] > 0.8


def test_train_transformers(tmp_path: Path) -> None:
    short = ("examples/train_transformers.py", "--steps", "10")
    end = ours_and_torchs(*short, own=("--output", str(tmp_path)), steps=10)
    assert end["eval_loss"] < 5.3  # untrained: ln 256 = 5.55
    assert (tmp_path / "checkpoint-10" / "model.safetensors").is_file()


def test_the_muon_pages_program(tmp_path: Path) -> None:
    assert_has_the_losses_of_its_page("muon.md", "Accelerate", tmp_path)


def test_all_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    code = signalled(code_of("fault_tolerance.md", "Accelerate"))
    (tmp_path / "program.py").write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{code}")
    assert common_last_step(launch(tmp_path / "program.py", ranks=2).stdout) >= 20
    assert (tmp_path / "stopped" / "model.safetensors").is_file()
