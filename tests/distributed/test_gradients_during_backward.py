"""Hooks that look at gradients, or change them, while backward runs: they see what they see with torch's class."""

import warnings

import pytest
import torch
from torch import nn

from tests.distributed.test_gradients_of_the_program import Net, batch
from tests.harness import each, on_ranks, over_both
from tests.models import assert_grads, grads_of, seeded
from tests.parity.compare import TorchDDP

pytestmark = pytest.mark.usefixtures("cheap_messages")


def on_tensor(module, act):
    module.first.weight.register_hook(act)


def on_accumulated(module, act):
    module.first.weight.register_post_accumulate_grad_hook(act)


def on_node(module, act):
    (node,) = [node for node, _ in module.first.weight.view(-1).grad_fn.next_functions]
    module.node = node  # which a parameter holds weakly
    node.register_hook(act)


def on_all_modules(module, act):
    def only_first(part, *_):
        if part is module.first:
            act()

    nn.modules.module.register_module_full_backward_hook(only_first)


# Ways to run `act` in backward once the other layers' gradients are there.
HOOKS = {
    "full backward": lambda module, act: module.first.register_full_backward_hook(act),
    "full backward pre": lambda module, act: module.first.register_full_backward_pre_hook(act),
    "all modules": on_all_modules,
    "tensor": on_tensor,
    "post-accumulate": on_accumulated,
    "node": on_node,
}


def step(parameter):
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=1e-3)


def replace(parameter):
    parameter.grad = torch.full_like(parameter, 7.0)


def drop(parameter):
    parameter.grad = None


ACTS = {
    "read": lambda parameter: None,
    "clip": lambda parameter: parameter.grad.clamp_(-0.01, 0.01),
    "clip by .data": lambda parameter: parameter.grad.data.clamp_(-0.01, 0.01),
    "zero": lambda parameter: parameter.grad.zero_(),
    "step": step,
    "replace": replace,
    "drop": drop,
}


def train(ddp, rank, register, act, **options):
    """After each step: what the hook has seen, what it has kept, and the gradients."""
    module, found = seeded(Net), {"seen": [], "kept": []}

    def run(*_):
        for parameter in (module.last.weight, module.large.weight, module.large.bias):
            found["seen"].append(parameter.grad.clone())
            found["kept"].append(parameter.grad)
            act(parameter)

    model = ddp(module, **options)
    register(module, run)
    for number in range(5):
        # New gradients, kept ones that are zero, and kept ones that are added to.
        if number != 3:
            module.zero_grad(set_to_none=number < 2)
        for grads in found.values():
            grads.clear()
        model(batch(rank, number)).square().sum().backward()
        noted = {f"{what} {index}": grad for what, grads in found.items() for index, grad in enumerate(grads)}
        yield {**{name: grad.clone() for name, grad in noted.items()}, **grads_of(module)}


@pytest.mark.filterwarnings("ignore:.*its gradient was written during backward")
@over_both
@on_ranks(2)
def test_a_registered_hook_sees_this_ranks_gradients(rank, ddp_class, transport):
    pairs = [(hook, act) for hook in HOOKS for act in ACTS if hook == "full backward" or act in ("read", "clip")]
    for hook, act in each(pairs):
        made = []
        for ddp in (lambda m: ddp_class(m, transport=transport), TorchDDP):
            made.append(list(train(ddp, rank, HOOKS[hook], ACTS[act])))
            nn.modules.module._global_backward_hooks.clear()
        for number, (ours, theirs) in enumerate(zip(*made, strict=True)):
            assert_grads(ours, theirs, 0.0, f"{hook}, {act}, step {number}:")


@over_both
@on_ranks(2)
def test_a_lost_write_is_a_warning(rank, ddp_class, transport):
    torch.set_warn_always(True)
    for act in each([act for act in ACTS if act not in ("read", "step", "clip by .data")]):
        model = ddp_class(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), transport=transport)
        last = model.module[1].weight
        model.module[0].register_full_backward_pre_hook(lambda *_, last=last, act=act: (ACTS[act](last), None)[1])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.ones(1, 2)).sum().backward()
        (text,) = [str(warning.message) for warning in caught if "written during backward" in str(warning.message)]
        assert f"parameter '1.weight' on rank {rank}: its gradient was written" in text and "no effect" in text


@over_both
@on_ranks(2)
def test_a_write_that_nobody_could_see_is_an_error(rank, ddp_class, transport):
    # By a hook on an activation, while the large gradient is reduced where it lies.
    class Watched(Net):
        write = staticmethod(lambda grad: None)

        def forward(self, x):
            inner = torch.tanh(self.first(x))
            if inner.requires_grad:
                inner.register_hook(lambda _: (self.write(self.large.weight.grad), None)[1])
            return self.last(torch.tanh(self.large(inner)))

    model = ddp_class(seeded(Watched), transport=transport)
    model(batch(rank, 0)).sum().backward()
    model.module.write = lambda grad: grad.mul_(2)
    model.zero_grad(set_to_none=False)
    with pytest.raises(
        RuntimeError, match=f"parameter 'large.weight' on rank {rank}: .*written during backward.*wrong"
    ):
        model(batch(rank, 0)).sum().backward()
    model.module.write = lambda grad: None
    model.zero_grad()
    model(batch(rank, 0)).sum().backward()


@over_both
@on_ranks(1, 2)
def test_gradients_after_a_backward_that_raised(rank, ddp_class, transport):
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise KeyError("planned")

    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.second(Fail.apply(self.first(x)))

    for hooked, none in each([(hooked, none) for hooked in (False, True) for none in (False, True)]):
        made = []
        for ddp in (lambda m: ddp_class(m, transport=transport), TorchDDP):
            model = ddp(seeded(Failing))
            if hooked:
                model.module.first.register_full_backward_hook(lambda *_: None)
            if not none:
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
            with pytest.raises(KeyError, match="planned"):
                model(torch.full((1, 3), 1.0 + rank)).square().sum().backward()
            made.append(grads_of(model))
        assert_grads(*made, 0.0, f"hooked {hooked}, None {none}")


@over_both
@on_ranks(2)
def test_gradients_are_reduced_where_they_lie_unless_there_is_a_hook(rank, ddp_class, transport):
    class Watched(Net):
        during = 0

        def look(self, _):
            self.during = self.large.weight.grad.data_ptr()

        def forward(self, x):
            inner = torch.tanh(self.first(x))
            inner.register_hook(self.look)
            return self.last(torch.tanh(self.large(inner)))

    model = ddp_class(seeded(Watched), transport=transport)
    large = model.module.large.weight
    handles = []
    for hooked in each([False, True, False]):
        if hooked:
            handles.append(model.module.first.register_full_backward_hook(lambda *_: None))
        else:
            [handle.remove() for handle in handles]
        for zeroed in (True, False):
            large.grad = None if zeroed else large.grad
            model(batch(rank, 0)).square().sum().backward()
            assert (model.module.during == large.grad.data_ptr()) is not hooked
