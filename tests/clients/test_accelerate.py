"""Accelerate and the Trainer with our engine: bitwise equal to torch's class, on two ranks under torchrun."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="accelerate and transformers are not installed: make test-clients")

import accelerate
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

from tests.clients.accelerate_ranks import Results, alone  # noqa: F401
from tests.clients.common import launch
from tests.harness import assert_each_raises
from torchddp.integrations.accelerate import Accelerator, TorchDDPKwargs, adopt
from torchddp.integrations.accelerate.options import merge

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.beyond_torch("is not tested here")]
pytestmark += [pytest.mark.usefixtures("alone")]


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
        ("adopted", 10),
        ("local_sgd", 5),
        ("synced_late", 1),
        # Including losses and norms; twelve microbatches are reduced six times.
        ("trainer", 6),
        ("trainer_bf16", 6),
        ("trainer_unused", 6),
        ("trainer_unused_by_default", 6),
        ("trainer_own_options", 6),
        ("trainer_adopted", 6),
    ],
)
def test_training_is_bitwise_equal_to_torchs_class(results: Results, job: str, steps: int) -> None:
    """Some jobs also run with Accelerate's own class after torchddp.install()."""
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


def test_evaluation_and_unwrapping(results: Results) -> None:
    ours = results.ours("evaluated")
    assert ours == results.torchs("evaluated")
    assert ours["samples"] == 37 and ours["unwraps"] and ours["wraps once"] and ours["is torch's"]
    assert "first.weight" in ours["keys"]


def test_uneven_inputs(results: Results) -> None:
    for rank, batches in enumerate((5, 4)):
        ours = results.ours("uneven", rank)
        assert ours == results.torchs("uneven", rank)
        assert ours["batches"] == batches and ours["said"]


def test_wrapping_twice_is_refused(results: Results) -> None:
    said = results.ours("wrapped_before")
    assert said.keys() == {"torch", "ours"}
    for text in said.values():
        assert "already" in text and "model.module" in text
    assert "torchddp." in said["ours"]


@pytest.mark.parametrize("argument", ["fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin"])
def test_other_ways_to_distribute_are_refused(argument: str) -> None:
    with pytest.raises(ValueError, match=rf"distributes them itself \({argument} was given\)"):
        Accelerator(**{argument: object()})


def test_another_way_by_the_environment_or_before_adoption(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = accelerate.Accelerator()
    accelerator.state.fsdp_plugin = object()
    with pytest.raises(ValueError, match="FSDP distributes them itself"):
        adopt(accelerator)
    assert type(accelerator) is accelerate.Accelerator
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="ACCELERATE_USE_FSDP=true"):
        Accelerator()


def test_wrong_arguments_are_named() -> None:
    accelerator = accelerate.Accelerator()
    two_handlers = [TorchDDPKwargs(), DistributedDataParallelKwargs()]
    powersgd = {"comm_hook": "powersgd", "comm_state_option": {"rank": 2}}
    wrapped = {"comm_hook": "int8", "comm_wrapper": DDPCommunicationHookType.FP16}
    assert_each_raises(
        (lambda: adopt(torch.nn.Linear(1, 1)), TypeError, "adopt() takes an accelerate.Accelerator, got Linear"),
        (lambda: adopt(accelerator, {"transprot": "shm"}), TypeError, "no option 'transprot'"),
        (lambda: adopt(accelerator, "shm"), TypeError, "got str"),
        (lambda: Accelerator(kwargs_handlers=two_handlers), ValueError, "one handler"),
        (lambda: Accelerator(transport="shm"), TypeError, "unexpected keyword argument 'transport'"),
        (lambda: TorchDDPKwargs(transprot="shm"), TypeError, "no option 'transprot': it takes adopt_large_gradients"),
        # Invalid values are refused at once, by the class's own checks.
        (lambda: TorchDDPKwargs(transport="smoke signals"), ValueError, "transport must be"),
        (lambda: TorchDDPKwargs(bucket_cap_mb=-1), ValueError, "positive number of MiB"),
        (lambda: TorchDDPKwargs(sync="never"), ValueError, "unknown sync strategy"),
        (lambda: TorchDDPKwargs(zero_weights="ignore"), ValueError, 'zero_weights must be "raise" or "zeros"'),
        (lambda: TorchDDPKwargs(comm_hook="fp12"), ValueError, "comm_hook must be one of"),
        (lambda: TorchDDPKwargs(**powersgd), ValueError, "goes with a DDPCommunicationHookType"),
        (lambda: TorchDDPKwargs(**wrapped), ValueError, "goes with a DDPCommunicationHookType"),
    )


def test_only_explicit_options_are_passed_on() -> None:
    assert TorchDDPKwargs().to_kwargs() == {}
    options: dict[str, Any] = {"gradient_as_bucket_view": False, "broadcast_buffers": True, "weighted": True}
    options["timeout"] = timedelta(seconds=5)
    assert TorchDDPKwargs(**options, comm_hook=DDPCommunicationHookType.FP16).to_kwargs() == options
    assert TorchDDPKwargs(comm_hook="int8").to_kwargs() == {"comm_hook": "int8"}


def test_options_override_those_of_the_accelerator() -> None:
    had = DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=1)
    merged = merge(had, {"bucket_cap_mb": "auto", "transport": "c10d"})
    assert merged.to_kwargs() == {"find_unused_parameters": True, "bucket_cap_mb": "auto", "transport": "c10d"}
    assert merge(had, {"find_unused_parameters": False}).to_kwargs() == {"bucket_cap_mb": 1}
    assert merge(None, TorchDDPKwargs(sync="forced_sync")).to_kwargs() == {"sync": "forced_sync"}


def test_a_single_process_is_not_wrapped() -> None:
    model = torch.nn.Linear(2, 2)
    assert Accelerator(kwargs_handlers=[TorchDDPKwargs()]).prepare(model) is model


def test_unused_clients_are_not_imported() -> None:
    code = """
import sys, torchddp
assert not sys.modules.keys() & {"accelerate", "transformers", "torchddp.integrations.accelerate"}
from torchddp.integrations import accelerate
for package, name in ("accelerate", "Accelerator"), ("transformers", "TorchDDPTrainer"):
    sys.modules[package] = None  # as if it were not installed
    try:
        getattr(accelerate, name)
    except ImportError as error:
        print(error)
    del sys.modules[package]
accelerate.Accelerator
"""
    said = [f"{package} is not installed: pip install {package}" for package in ("accelerate", "transformers")]
    assert launch("-c", code, timeout_s=110).stdout.splitlines() == said


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
