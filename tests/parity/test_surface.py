"""The drop-in surface: constructor, subclass, state_dict, pickling, copies, nesting."""

import contextlib
import inspect
import pickle
import warnings
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchddp
from tests.harness import each, is_own_class, on_ranks, through_a_file
from tests.models import (
    Mlp,
    NormNet,
    TwoHeads,
    assert_grads,
    assert_trains,
    batch,
    expected_grads,
    grads_of,
    loss_of,
    seeded,
    step_on,
    train,
)
from tests.parity.compare import TorchDDP
from torchddp.ddp import former_names

# The one default that differs on purpose: None means bucket views unless something rules them out.
OWN_DEFAULTS = {"gradient_as_bucket_view"}


def test_constructor_has_torchs_arguments_in_torchs_order(ddp_class):
    ours = list(inspect.signature(ddp_class.__init__).parameters.values())
    theirs = [p for p in inspect.signature(TorchDDP.__init__).parameters.values() if p.name not in former_names._NEWER]
    assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
    for mine, torchs in zip(ours, theirs, strict=False):
        assert mine.kind == torchs.kind, mine.name
        assert mine.default == torchs.default or mine.name in OWN_DEFAULTS, mine.name
    extra = ours[len(theirs) :]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in extra), extra


def place_of_warnings(cls, options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cls(seeded(Mlp), **options)
    return [(w.category, w.filename, w.lineno) for w in caught]


def derived(base):
    class Derived(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    return Derived


@on_ranks(1)
def test_constructor_warnings_point_at_the_same_line_as_torchs(ddp_class):
    choices = [{"broadcast_buffers": True}, {"broadcast_buffers": False}, {"check_reduction": True}]
    choices.append({"broadcast_buffers": True, "forward_sync_buffers": True})
    classes = (lambda base: base, derived, lambda base: type("Inherits", (derived(base),), {}))
    for options, make_class in each(choices, classes):
        ours, theirs = (place_of_warnings(make_class(base), options) for base in (ddp_class, TorchDDP))
        assert ours == theirs
        assert {file for _, file, _ in ours} <= {__file__}
        plain = ddp_class(seeded(NormNet), **options)
        assert plain.forward_sync_buffers == TorchDDP(seeded(NormNet), **options).forward_sync_buffers


@pytest.mark.beyond_torch("wraps without a word")
@on_ranks(2)
def test_two_wrappers_train_and_a_warning_points_at_the_users_line(ddp_class, rank):
    for made in (ddp_class, derived(ddp_class)):
        with pytest.warns(UserWarning, match="already wrapped") as caught:
            outer = made(ddp_class(seeded(Mlp)))
        assert [warning.filename for warning in caught] == [__file__]
        assert_trains(outer, rank)


@on_ranks(1)
def test_is_a_subclass_of_torchs(ddp_class, rank):
    if is_own_class():
        assert torchddp.DDP is torchddp.DistributedDataParallel is ddp_class

    ddp = ddp_class(seeded(Mlp))
    assert isinstance(ddp, TorchDDP) and isinstance(ddp.module, Mlp)
    assert ddp.process_group is dist.group.WORLD and ddp.device == torch.device("cpu")


@on_ranks(2)
def test_state_dict_has_torchs_keys_and_loads_both_ways(ddp_class, rank):
    ours, theirs, plain = ddp_class(seeded(NormNet)), TorchDDP(seeded(NormNet, 1)), seeded(NormNet, 2)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    theirs.load_state_dict(ours.state_dict())
    plain.load_state_dict(ours.module.state_dict())
    ours.load_state_dict(theirs.state_dict())
    for a, b in zip(ours.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    # Also between steps.
    for step in range(3):
        for ddp in (ours, theirs):
            ddp.load_state_dict({f"module.{name}": v for name, v in seeded(NormNet, step).state_dict().items()})
            ddp.zero_grad()
            loss_of(ddp(batch(rank, step, 4, 3, 6, 6))).backward()
        assert_grads(grads_of(ours), grads_of(theirs), rtol=0)


@pytest.mark.parametrize(
    "static_graph",
    [False, pytest.param(True, marks=pytest.mark.beyond_torch("a loaded static graph is never recorded again"))],
)
@on_ranks(2)
def test_pickled_and_loaded_model_trains_on(ddp_class, static_graph, rank):
    ddp = ddp_class(seeded(Mlp), static_graph=static_graph)
    for step in range(2):
        step_on(ddp, rank, step)
    loaded = through_a_file(ddp, weights_only=False)
    assert type(loaded) is ddp_class and loaded.static_graph is static_graph
    assert_trains(loaded, rank)
    assert_trains(pickle.loads(pickle.dumps(loaded)), rank)


@on_ranks(2)
def test_ddp_inside_ddp_with_ignored_parameters(ddp_class, rank):
    """An inner DDP over another group; the outer DDP ignores its parameters."""
    model = seeded(lambda: nn.Sequential(Mlp(), nn.Linear(8, 2, dtype=torch.float64)))
    want = expected_grads(model, step_on)
    model[0] = ddp_class(model[0], process_group=dist.new_group([0, 1]))
    inner = [name for name, _ in model.named_parameters() if name.startswith("0.")]
    ddp_class._set_params_and_buffers_to_ignore_for_model(model, inner)
    ddp = ddp_class(model)
    step_on(ddp, rank)
    assert_grads(grads_of(ddp), want)


@on_ranks(2)
def test_hooks_of_outputs_not_in_the_loss_fire_as_with_torch(ddp_class, rank):
    """With find_unused_parameters they fire without a gradient, and .grad is unchanged."""

    def fired(cls, sync):
        ddp = cls(seeded(TwoHeads), find_unused_parameters=True)
        names = []
        for name, p in ddp.module.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: names.append((name, p.grad is None)))
        with contextlib.nullcontext() if sync else ddp.no_sync():
            left, _ = ddp(batch(rank, 0, 3, 4))
            loss_of(left).backward()
        return sorted(names)

    for sync in each([True, False]):
        want = fired(TorchDDP, sync)
        assert ("right.weight", True) in want
        assert fired(ddp_class, sync) == want


@on_ranks(2)
def test_keyword_and_nested_inputs_and_outputs(ddp_class, rank):
    class Keyed(TwoHeads):
        def forward(self, *, data):
            left, right = super().forward(data["x"])
            return {"out": [left, (right, None, 3)]}

    ddp = ddp_class(seeded(Keyed), find_unused_parameters=True)
    out = ddp(data={"x": batch(rank, 0, 3, 4)})
    left, (right, nothing, three) = out["out"]
    assert nothing is None and three == 3
    (loss_of(left) + loss_of(right)).backward()
    want = expected_grads(seeded(TwoHeads), lambda m, r: loss_of(m(batch(r, 0, 3, 4))).backward())
    assert_grads(grads_of(ddp), want)


@on_ranks(2)
def test_evaluation_of_a_model_wrapped_in_inference_mode(ddp_class, rank):
    for made_there in each([True, False]):
        with torch.inference_mode(made_there):
            model = seeded(Mlp)
        with torch.inference_mode():
            want = model.eval()(batch(rank, 0))
            assert torch.equal(ddp_class(model)(batch(rank, 0)), want)
        if not made_there:
            assert_trains(ddp_class(model.train()), rank)


@on_ranks(2)
def test_torchs_forward_replaced_as_profilers_do(ddp_class, rank, monkeypatch):
    original, calls = TorchDDP.forward, []

    def timed(self, *inputs):
        calls.append(type(self))
        return original(self, *inputs)

    monkeypatch.setattr(TorchDDP, "forward", timed)
    models = [base(seeded(Mlp)) for base in (ddp_class, TorchDDP)]
    for model in models:
        train(model, rank)
    assert_grads(*map(grads_of, models), rtol=0)
    assert calls.count(ddp_class) == calls.count(TorchDDP) > 0


@on_ranks(2)
def test_a_program_that_arms_the_reducer_itself(ddp_class, rank):
    """For a backward without a forward of the model: several losses, or a part of the module."""
    models = [base(seeded(Mlp), find_unused_parameters=True) for base in (ddp_class, TorchDDP)]
    for model in models:
        output = model.module(batch(rank, 0))
        model.reducer.prepare_for_backward(output)
        loss_of(output).backward()
        output = model(batch(rank, 1))
        loss_of(output).backward(retain_graph=True)
        model.reducer.prepare_for_backward([output])
        loss_of(output).backward()
    assert_grads(*map(grads_of, models), rtol=0)


@on_ranks(2)
def test_a_subclass_that_overrides_what_runs_the_module(ddp_class, rank):
    def trained(base):
        class Doubled(base):
            def _run_ddp_forward(self, *inputs, **kwargs):
                return 2 * super()._run_ddp_forward(*inputs, **kwargs)

        ddp = Doubled(seeded(Mlp))
        train(ddp, rank)
        return grads_of(ddp)

    assert_grads(trained(ddp_class), trained(TorchDDP), rtol=0)


@on_ranks(2)
def test_a_subclass_with_common_names_of_its_own(ddp_class, rank):
    class Net(Mlp):
        _policy = "net's"

        def _forward(self, x):
            return super().forward(x)

    def trained(base):
        class Passing(base):
            def _forward(self, *inputs):
                return self.module._forward(*inputs)

            def __getattr__(self, name):
                try:
                    return super().__getattr__(name)
                except AttributeError:
                    return getattr(self.module, name)

        ddp = Passing(seeded(Net))
        train(ddp, rank)
        assert ddp._policy == "net's"
        return grads_of(ddp)

    assert_grads(trained(ddp_class), trained(TorchDDP), rtol=0)


@on_ranks(2)
def test_a_subclass_that_skips_the_constructor(ddp_class):
    """As mmengine's, which wraps parts of the model in models of their own."""

    class Bare(ddp_class):
        def __init__(self, module):
            nn.Module.__init__(self)
            self.module = module

    bare = Bare(seeded(Mlp))
    bare.module.last.weight.grad = torch.ones_like(bare.module.last.weight)
    bare.zero_grad()
    assert bare.module.last.weight.grad is None


@on_ranks(2)
def test_a_subclass_that_overrides_how_buffers_are_broadcast(ddp_class, rank):
    def buffers_after_a_step(base):
        class Selective(base):
            seen: ClassVar[list[str]] = []

            def _sync_module_buffers(self, *args):
                self.seen.append(f"sync, with gradients: {torch.is_grad_enabled()}")
                super()._sync_module_buffers(*args)

            def _assign_modules_buffers(self):
                super()._assign_modules_buffers()
                self.modules_buffers = self.modules_buffers[1:]

            def _distributed_broadcast_coalesced(self, tensors, *args):
                super()._distributed_broadcast_coalesced([t for t in tensors if t.is_floating_point()], *args)

        ddp = Selective(seeded(NormNet))
        for buffer in ddp.buffers():
            buffer.fill_(rank + 1)
        loss_of(ddp(batch(rank, 0, 4, 3, 6, 6))).backward()
        return dict(ddp.named_buffers()), ddp.seen

    (ours, calls), (theirs, torchs_calls) = (buffers_after_a_step(base) for base in (ddp_class, TorchDDP))
    assert_grads(ours, theirs, rtol=0)
    assert calls == torchs_calls == ["sync, with gradients: False"]
