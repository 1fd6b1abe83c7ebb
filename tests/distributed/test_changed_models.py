"""A warning, once, if a model was changed after wrapping so that its reducer gets no gradient, and only then."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune

import torchddp
from tests.harness import each, on_ranks
from tests.models import Mlp, batch, loss_of, seeded

pytestmark = pytest.mark.beyond_torch("goes on in silence")

OLD_STEPS = 3
SEARCH = {"find_unused_parameters": True}


def net():
    return seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))


def train(model, steps=4, dtype=torch.float32):
    for step in range(steps):
        model.zero_grad()
        model(torch.full((2, 4), 1.0 + step, dtype=dtype)).sum().backward()


def copied(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def load(model):
    model.load_state_dict(copied(model), assign=True)


CONVERTED = "were converted to another dtype or device"
REPLACED = "were replaced by other parameters"
# By change: the dtype after it, and the warning's words.
CHANGES = {
    "converted": (nn.Module.double, torch.float64, rf"0\.weight \(torch\.float32 to torch\.float64\), .* {CONVERTED}"),
    "converted_inside": (lambda model: model.module.bfloat16(), torch.bfloat16, rf"torch\.bfloat16\), .* {CONVERTED}"),
    "converted_and_back": (lambda model: model.double().float(), torch.float32, rf"0\.weight, 0\.bias, .* {CONVERTED}"),
    "loaded": (load, torch.float32, rf"0\.weight, 0\.bias, .* {REPLACED} \(load_state_dict with assign=True"),
    "loaded_inside": (lambda model: load(model.module), torch.float32, REPLACED),
}


@on_ranks(2)
def test_lost_parameters_are_named_once(rank):
    cases = [(name, options, steps) for name in CHANGES for options in ({}, SEARCH) for steps in (0, OLD_STEPS)]
    for name, options, old_steps in each([*cases, ("loaded_inside", {"static_graph": True}, OLD_STEPS)]):
        change, dtype, words = CHANGES[name]
        model = torchddp.DDP(net(), **options)
        train(model, old_steps)
        change(model)
        with pytest.warns(UserWarning, match=words) as caught:
            train(model, dtype=dtype)
        (told,) = [w for w in caught if "was changed after it was wrapped" in str(w.message)]
        assert f"rank {rank}" in str(told.message) and told.filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, 8, dtype)
    # A single layer is named.
    model = torchddp.DDP(seeded(Mlp), find_unused_parameters=True)
    load(model.module.last)
    with pytest.warns(UserWarning, match=r": last\.weight was replaced by other parameters"):
        loss_of(model(batch(rank))).backward()


class Silent:
    """Changes after which nothing is lost."""

    def without_backward(model):
        for _ in range(9):
            model(torch.ones(2, 4))

    def two_forwards_a_backward(model):
        for _ in range(9):
            (model(torch.ones(2, 4)) + model(torch.zeros(2, 4))).sum().backward()

    def with_other_tensors(model):
        for kind in (
            lambda p: p.detach().clone().requires_grad_(),
            lambda p: nn.Parameter(p.detach().clone()),
            lambda p: p,
        ):
            for _ in range(5):
                tensors = {name: kind(p) for name, p in model.named_parameters()}
                functional_call(model, tensors, (torch.ones(2, 4),)).sum().backward()

    def frozen_for_a_while(model):
        model.requires_grad_(False)
        model(torch.ones(2, 4))
        model.requires_grad_(True)

    def new_data(model):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()

    def under_no_sync(model):
        with model.no_sync():
            train(model)

    def as_a_copy(model):
        train(copy.deepcopy(model))
        train(pickle.loads(pickle.dumps(model)))

    def in_evaluation(model):
        with torch.no_grad():
            model.eval()(torch.ones(2, 4))
        model.train()

    def loaded_in_place_and_moved_to_the_same(model):
        model.load_state_dict(copied(model))
        model.float().to("cpu")

    def pruned(model):
        prune.l1_unstructured(model.module[0], "weight", 0.5)


@on_ranks(2)
def test_no_warning_if_nothing_is_lost(rank):
    for name in each([name for name in vars(Silent) if not name.startswith("_")]):
        model = torchddp.DDP(net())
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            getattr(Silent, name)(model)
            train(model, 10)


@on_ranks(2)
def test_no_warning_about_parameters_handled_elsewhere(rank):
    def parametrised():
        module = net()
        parametrizations.weight_norm(module[0])
        return torchddp.DDP(module)

    def left_out():
        module = net()
        torchddp.DDP._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
        model, bias = torchddp.DDP(module), module[0].bias
        module[0].load_state_dict(copy.deepcopy(module[0].state_dict()), assign=True)
        module[0].bias = bias
        return model

    def averaged_late():
        module = net()
        late = [("0.weight", module[0].weight)]
        return torchddp.DDP(module, delay_all_reduce_named_params=late, param_to_hook_all_reduce=module[2].weight)

    def in_parts():
        module = net()
        dist.fsdp.fully_shard(module[0])
        torchddp.DDP._set_params_and_buffers_to_ignore_for_model(module, ["0.weight", "0.bias"])
        return torchddp.DDP(module)

    cast = {"mp_policy": dist.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    replicated = [lambda options=options: torchddp.replicate(net(), **options) for options in ({}, cast)]
    for make in (parametrised, left_out, averaged_late, in_parts, *replicated):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*changed after it was wrapped")
            train(make(), 5)
