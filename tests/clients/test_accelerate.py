"""Accelerate over our engine: the bits of torch's class, by our reducer, on two ranks that torchrun starts."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import tomllib
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed: make test-clients")

import accelerate
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

from tests.clients.accelerate_ranks import Results, alone  # noqa: F401
from tests.clients.common import ROOT, assert_hears_of_no_trap, launch
from tests.harness import assert_each_raises
from torchddp.integrations.accelerate import Accelerator, TorchDDPKwargs, adopt
from torchddp.integrations.accelerate.options import merge

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.beyond_torch("is not tested here")]
pytestmark += [pytest.mark.usefixtures("alone")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results("tests.clients.accelerate_jobs", tmp_path_factory.mktemp("accelerate"))


@pytest.mark.parametrize(
    ("job", "steps"),
    [
        ("plain", 10),
        ("accumulation", 6),  # of five batches in two epochs: the last of an epoch ends a step
        ("bf16", 10),
        ("unused", 10),
        ("torchs_options", 10),
        ("fp16_hook", 10),
        ("power_sgd_hook", 10),
        ("compiled", 10),
        ("own_options", 10),
        ("static_graph_accumulation", 6),
        ("adopted", 10),
        ("skipping", 2),
        ("synced_late", 1),
    ],
)
def test_training_gives_the_bits_of_torchs_class(results: Results, job: str, steps: int) -> None:
    results.assert_same(job, steps)


def test_options_have_an_effect(results: Results) -> None:
    plain = results.torchs("plain")["weights"]
    for job in ("accumulation", "bf16", "unused", "fp16_hook", "power_sgd_hook"):
        assert results.ours(job)["weights"] != plain, job


def test_hooks_that_torchs_class_has_not_on_cpu(results: Results) -> None:
    hooks = [results.ours("named_hooks", rank) for rank in range(2)]
    assert hooks[0].keys() == {"bf16", "named", "int8"}
    weights = {name: result["weights"] for name, result in hooks[0].items()}
    assert len({*weights.values(), results.ours("plain")["weights"]}) == 4
    assert {result["steps"] for result in hooks[0].values()} == {10}
    assert {name: result["weights"] for name, result in hooks[1].items()} == weights


def test_local_sgd(results: Results) -> None:
    """Nothing is reduced inside, and each step after it."""
    assert results.ours("local_sgd")["inside"] == 0
    results.assert_same("local_sgd", 5)


def test_states_load_in_either_class(results: Results) -> None:
    for rank in range(2):
        ends = [*results.ours("states", rank).values(), *results.torchs("states", rank).values()]
        assert len(ends) == 6 and all(end == ends[0] for end in ends)


def test_metrics_count_each_sample_once(results: Results) -> None:
    assert results.ours("metrics") == results.torchs("metrics")
    assert results.ours("metrics")["samples"] == 37


def test_unwrapping(results: Results) -> None:
    ours = results.ours("unwrapping")
    assert ours == results.torchs("unwrapping")
    assert ours["bare"] and ours["once"] and ours["is torch's"]
    assert "first.weight" in ours["keys"]


def test_uneven_inputs(results: Results) -> None:
    batches = [results.ours("uneven", rank)["batches"] for rank in range(2)]
    assert batches == [5, 4]
    for rank in range(2):
        assert results.ours("uneven", rank) == results.torchs("uneven", rank)
    assert results.ours("uneven")["said"]


def test_wrapping_twice_is_refused(results: Results) -> None:
    said = results.ours("wrapped_before")
    assert said.keys() == {"torch", "ours"}
    for text in said.values():
        assert "already" in text and "model.module" in text
    assert "torchddp." in said["ours"]


def test_right_loops_hear_of_no_trap() -> None:
    assert_hears_of_no_trap("tests.clients.traps_accelerate")


# --- bad input, in one process


@pytest.mark.parametrize("argument", ["fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin"])
def test_other_ways_to_distribute_are_refused(argument: str) -> None:
    with pytest.raises(ValueError, match=rf"distributes them itself \({argument} was given\)"):
        Accelerator(**{argument: object()})


def test_another_way_by_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="ACCELERATE_USE_FSDP=true"):
        Accelerator()


def test_an_accelerator_with_another_plug_in_is_not_adopted() -> None:
    accelerator = accelerate.Accelerator()
    accelerator.state.fsdp_plugin = object()
    with pytest.raises(ValueError, match="FSDP distributes them itself"):
        adopt(accelerator)
    assert type(accelerator) is accelerate.Accelerator


def test_wrong_arguments_are_named() -> None:
    accelerator = accelerate.Accelerator()
    two_handlers = [TorchDDPKwargs(), DistributedDataParallelKwargs()]
    assert_each_raises(
        (lambda: adopt(torch.nn.Linear(1, 1)), TypeError, "adopt() takes an accelerate.Accelerator, got Linear"),
        (lambda: adopt(accelerator, {"transprot": "shm"}), TypeError, "no option 'transprot'"),
        (lambda: adopt(accelerator, "shm"), TypeError, "got str"),
        (lambda: Accelerator(kwargs_handlers=two_handlers), ValueError, "one handler"),
        (lambda: Accelerator(transport="shm"), TypeError, "unexpected keyword argument 'transport'"),
    )
    with pytest.raises(TypeError, match="no option 'transprot': it takes .*transport"):
        TorchDDPKwargs(transprot="shm")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transport": "smoke signals"}, "transport must be"),
        ({"comm_hook": "fp12"}, "comm_hook must be one of"),
        ({"bucket_cap_mb": -1}, "positive number of MiB"),
        ({"find_nonfinite": "log"}, "find_nonfinite must be"),
        ({"sync": "never"}, "unknown sync strategy"),
        ({"stall_report_s": -1}, "stall_report_s"),
        ({"comm_hook": "powersgd", "comm_state_option": {"rank": 2}}, "goes with a DDPCommunicationHookType"),
        ({"comm_hook": "int8", "comm_wrapper": DDPCommunicationHookType.FP16}, "goes with a DDPCommunicationHookType"),
    ],
)
def test_wrong_values_are_refused_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TorchDDPKwargs(**options)


def test_only_what_was_asked_for_is_passed_on() -> None:
    assert TorchDDPKwargs().to_kwargs() == {}
    options = {"gradient_as_bucket_view": False, "broadcast_buffers": True, "timeout": timedelta(seconds=5)}
    assert TorchDDPKwargs(**options, comm_hook=DDPCommunicationHookType.FP16).to_kwargs() == options
    assert TorchDDPKwargs(comm_hook="int8").to_kwargs() == {"comm_hook": "int8"}


def test_options_win_over_what_the_accelerator_had() -> None:
    had = DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=1)
    merged = merge(had, {"bucket_cap_mb": "auto", "transport": "c10d"})
    assert merged.to_kwargs() == {"find_unused_parameters": True, "bucket_cap_mb": "auto", "transport": "c10d"}
    assert merge(had, {"find_unused_parameters": False}).to_kwargs() == {"bucket_cap_mb": 1}
    assert merge(None, TorchDDPKwargs(sync="forced_sync")).to_kwargs() == {"sync": "forced_sync"}


def test_alone_nothing_is_wrapped() -> None:
    model = torch.nn.Linear(2, 2)
    assert Accelerator(kwargs_handlers=[TorchDDPKwargs()]).prepare(model) is model


def _python(code: str) -> str:
    return launch("-c", code, timeout_s=110).stdout.strip()


def test_importing_torchddp_imports_no_client() -> None:
    clients = "[m for m in ('accelerate', 'transformers', 'torchddp.integrations.accelerate') if m in sys.modules]"
    assert _python(f"import sys, torchddp; print({clients})") == "[]"
    line = f"import sys; from torchddp.integrations.accelerate import Accelerator; print({clients})"
    assert "transformers" not in _python(line).replace("torchddp.integrations.accelerate", "")


@pytest.mark.parametrize(("absent", "name"), [("accelerate", "Accelerator"), ("transformers", "TorchDDPTrainer")])
def test_an_absent_client_is_named_in_one_line(absent: str, name: str) -> None:
    lines = f"""
import sys

sys.modules[{absent!r}] = None
try:
    from torchddp.integrations.accelerate import {name}
except ImportError as error:
    print(error)
"""
    assert _python(lines) == f"{absent} is not installed: pip install {absent}"


def test_the_requirements_pin_what_the_page_says() -> None:
    pinned = tomllib.loads(Path(ROOT, "pyproject.toml").read_text())["dependency-groups"]["accelerate"]
    page = Path(ROOT, "docs/accelerate.md").read_text()
    for package in ("accelerate", "transformers"):
        version = next(line for line in pinned if f"{package}==" in line).partition("==")[2]
        assert version in page, package
