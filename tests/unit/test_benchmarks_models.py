"""The benchmark's built-in models and models given by the user."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.cases.gpu import ResNet
from tests.harness import each
from tests.unit import benchmark_models
from torchddp.bench import cli
from torchddp.bench.cases import DEFAULT_CASES
from torchddp.bench.registry import CASES, USERS_CASES
from torchddp.harness import models
from torchddp.harness.command import MODEL_NAMES
from torchddp.harness.models import MODELS, describe_model, load_factory, make_batch, make_model, prove, run_forward
from torchddp.harness.variants import TORCH_DDP, ArgumentError

OWN = benchmark_models.__name__


def test_names_known_without_torch_match_the_cases_and_models() -> None:
    assert set(DEFAULT_CASES) <= set(USERS_CASES)
    assert re.findall(r"^  (\w+)  ", cli.HELP, re.MULTILINE) == list(USERS_CASES)
    assert tuple(MODELS) == MODEL_NAMES
    assert all(
        set(case.models) | set(case.quick_models) <= MODELS.keys() for case in (CASES[name] for name in USERS_CASES)
    )


def test_networks_have_their_published_sizes() -> None:
    with torch.device("meta"):
        found, resnet = describe_model("gpt2", make_model("gpt2", 0)), ResNet()
    assert (found["parameters"], found["gradient_bytes"]) == (148, 4 * 124_439_808)
    parameters = list(resnet.parameters())
    assert (len(parameters), sum(p.numel() for p in parameters)) == (161, 25_557_032)


@pytest.mark.parametrize("factory", ["with_tuple", "with_dict", "with_generator"])
def test_tuple_dict_and_generated_batches_reach_the_module(factory: str) -> None:
    name = f"{OWN}:{factory}"
    spec, model = load_factory(name, 0), make_model(name, 0)
    loss = spec.loss(run_forward(model, make_batch(name, 0, rank=0, index=0)))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.zero_grad(set_to_none=True)
    assert spec.batches_differ is (factory == "with_generator")
    if spec.batches_differ:
        assert not torch.equal(make_batch(name, 0, rank=0, index=0), make_batch(name, 0, rank=1, index=0))


class Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output.sum()


LINEAR, BATCH = nn.Linear(8, 2), torch.ones(4, 8)
NO_TENSOR = nn.Linear(8, 2)
NO_TENSOR.register_forward_hook(lambda *_: "text")


def test_an_invalid_model_is_reported_in_one_sentence(monkeypatch):
    cases = (
        (7, "the factory returned an int; it must return (module, batch)"),
        ((LINEAR, 3), "the factory's batch is an int; it must return (module, batch)"),
        ((LINEAR, BATCH, 3), "the factory's loss is an int; it must return (module, batch)"),
        ((nn.Flatten(), BATCH), "no parameter of the module requires a gradient."),
        ((LINEAR, torch.ones(4, 9)), "forward or loss raised RuntimeError: mat1 and mat2"),
        ((NO_TENSOR, BATCH), "raised TypeError: found no tensor to differentiate in the model's output, a str"),
        ((LINEAR, BATCH, lambda output: output), "the loss must be a scalar tensor that requires a gradient."),
        ((LINEAR, BATCH, Undifferentiable.apply), "backward raised NotImplementedError: "),
        ((nn.Embedding(4, 2, sparse=True), torch.tensor([1])), "parameter 'weight' has a sparse gradient, which "),
    )
    for made, words in each(cases):
        monkeypatch.setattr(models.dist, "get_rank", lambda: 0)
        monkeypatch.setattr(benchmark_models, "seeded", lambda made=made: made, raising=False)
        load_factory.cache_clear()
        with pytest.raises(ArgumentError) as caught:
            prove(f"{OWN}:seeded", 0)
        message = str(caught.value)
        assert message.startswith(f"--model {OWN}:seeded: ") and "\n" not in message and words in message
    cases = (
        ("no_such_package:x", "cannot import 'no_such_package'"),
        (f"{OWN}:missing", "has no function or class named 'missing'"),
    )
    for model, words in each(cases):
        with pytest.raises(ArgumentError, match=f"^--model {model}: .*{words}"):
            prove(model, 0)


def test_a_model_that_fails_in_a_rank_ends_the_command_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    brief = ["--case", "step_time", "--seconds", "0.1", "--quick", "--ours", TORCH_DDP, "--world-size", "1"]
    assert cli.main([*brief, "--model", f"{OWN}:raising"]) == 2
    captured = capsys.readouterr()
    assert captured.out.strip() == "" and captured.err.startswith("error: --model ") and captured.err.count("\n") == 1
    assert "the factory raised RuntimeError: no weights here" in captured.err


def test_a_factory_with_a_seed_gives_all_ranks_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> tuple[Any, ...]:
        return nn.Linear(4, 4), torch.zeros(1, 4)

    monkeypatch.setattr(benchmark_models, "seeded", make, raising=False)
    load_factory.cache_clear()
    first = make_model(f"{OWN}:seeded", 3)
    load_factory.cache_clear()
    torch.manual_seed(99)
    again, other = make_model(f"{OWN}:seeded", 3), make_model(f"{OWN}:seeded", 4)
    assert torch.equal(first.weight, again.weight)  # type: ignore[arg-type]
    assert not torch.equal(first.weight, other.weight)  # type: ignore[arg-type]
