"""torchddp.optim.OSS trains like the plain optimizer; its errors name rank and parameter, and it never hangs."""

import math
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler

from tests.harness import assert_each_raises, each, gathered, on_ranks
from tests.models import Mlp, same_on_all_ranks, seeded
from tests.oss import float_mlp, twins, two_groups, weights
from torchddp.optim import OSS

OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adafactor, {}),
    (torch.optim.ASGD, {}),
]
IDS = [f"{optim.__name__}{'-fused' if 'fused' in options else ''}" for optim, options in OPTIMIZERS]


@pytest.mark.rest_is_thorough("*-2", "AdamW-1", "Adam-3", "SGD-4")
@on_ranks(1, 2, 3, pytest.param(4, marks=pytest.mark.slow))
@pytest.mark.parametrize(("optim", "options"), OPTIMIZERS, ids=IDS)
def test_twenty_steps_equal_the_plain_optimizer(rank, optim, options):
    pair = twins(optim, options, two_groups)
    start = [p.detach().clone() for p in pair.model.parameters()]
    for step in range(20):
        pair.train_alike(range(step, step + 1))
    assert not any(torch.equal(a, b) for a, b in zip(start, pair.model.parameters(), strict=True))


@on_ranks(4)
def test_more_ranks_than_parameters(rank):
    pair = twins(make=lambda: torch.nn.Linear(8, 2))
    pair.train_alike(range(5))
    assert sorted(gathered(len(pair.oss.state))) == [0, 0, 1, 1]
    assert all(pair.oss.param_to_rank[p] == rank for p in pair.oss.state)
    with pytest.raises(TypeError):
        pair.oss.param_to_rank[pair.model.module.weight] = 5


@on_ranks(3)
def test_small_fp16_and_other_messages(rank):
    # Small messages of parameters with other memory layouts.
    def transposed():
        model = Mlp(dtype=torch.float32)
        for layer in (model.first, model.last):
            layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t())
        model.scale = torch.nn.Parameter(torch.ones(2)[::2])  # contiguous, although its stride is 2
        model.register_forward_hook(lambda model, inputs, output: output * model.scale)
        assert not model.first.weight.is_contiguous()
        return model

    for size in (1, 100, 500):
        pair = twins(make=transposed, broadcast_buffer_size=size)
        pair.train_alike(range(3))

    # In fp16: all replicas end with the same rounded values.
    pair = twins(broadcast_fp16=True)
    pair.train(range(4))
    values = torch.cat([p.detach().flatten() for p in pair.model.parameters()])
    plain = torch.cat([p.detach().flatten() for p in pair.reference.parameters()])
    assert torch.equal(values, values.half().float()) and not torch.equal(values, plain)
    torch.testing.assert_close(values, plain, rtol=0.02, atol=0.005)
    assert same_on_all_ranks([values])


@on_ranks(2)
def test_some_parameters_are_converted_after_the_constructor(rank):
    params = weights(*[8] * 4)
    oss = OSS(params, torch.optim.SGD, lr=0.01)
    for param in params[:2]:
        param.data = param.data.bfloat16()
    for param in params:
        param.grad = torch.ones_like(param)
    oss.step()
    assert torch.equal(params[2], torch.full((8,), 0.99)) and same_on_all_ranks(params)


@on_ranks(2)
def test_dtypes_that_no_backend_supports_and_order_of_messages(rank, monkeypatch):
    # Dtypes that no backend supports.
    params = [torch.nn.Parameter(torch.ones(5, dtype=t)) for t in (torch.bfloat16, torch.complex64, torch.float64)]
    oss = OSS(params, torch.optim.SGD, lr=0.5)
    for param in params:
        param.grad = torch.ones_like(param)
    oss.step()
    assert all(torch.equal(p, torch.full_like(p, 0.5)) for p in params)

    # Every message starts before any wait.
    pair = twins(broadcast_buffer_size=100)
    events = []
    broadcast = dist.broadcast

    def watched(*args, **kwargs):
        events.append("start")
        assert kwargs["async_op"]
        work = broadcast(*args, **kwargs)
        return SimpleNamespace(wait=lambda: (events.append("wait"), work.wait()))

    pair.backward(0)
    monkeypatch.setattr(dist, "broadcast", watched)
    pair.oss.step()
    count = events.count("start")
    assert count > 2 and events == ["start"] * count + ["wait"] * count


@on_ranks(2)
def test_a_step_that_raises_on_all_ranks(rank):
    pair = twins(torch.optim.SGD, {"lr": 0.1}, broadcast_buffer_size=100)
    for step, lr in enumerate([0.1, "high", 0.1, 0.2]):
        pair.backward(step)
        for _, optimizer in pair.sides():
            for group in optimizer.param_groups:
                group["lr"] = lr
            with pytest.raises(TypeError) if lr == "high" else nullcontext():
                optimizer.step()
    pair.assert_equal()


class Failing(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if self.fails:
            raise MemoryError
        return super().step(closure)


@on_ranks(2)
def test_a_step_that_raises_on_one_rank_leaves_no_message_out(rank):
    params = [nn.Parameter(torch.zeros(3)) for _ in range(4)]
    optimizer = OSS(params, Failing, lr=1.0)
    for step in range(3):
        Failing.fails = (rank, step) == (1, 1)
        for p in params:
            p.grad = torch.ones(3)
        with pytest.raises(MemoryError) if Failing.fails else nullcontext():
            optimizer.step()
    assert {(owner, p[0].item()) for p, owner in optimizer.param_to_rank.items()} == {(0, -3.0), (1, -2.0)}


SCHEDULERS = [
    partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20),  # changes betas as well
    partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
    partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=4),
    partial(lr_scheduler.LambdaLR, lr_lambda=[lambda step: 1 / (step + 1), lambda step: 0.9**step]),
    partial(lr_scheduler.ReduceLROnPlateau, patience=1),
]


@on_ranks(2)
def test_schedulers_closures_hooks_and_named_parameters(rank):
    # Schedulers.
    for make in each(SCHEDULERS):
        pair, rates = twins(groups=two_groups), set()
        both = [make(optimizer) for optimizer in (pair.oss, pair.plain)]
        for step in range(12):
            pair.train_alike(range(step, step + 1))
            for scheduler in both:
                scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
            assert [g["lr"] for g in pair.oss.param_groups] == [g["lr"] for g in pair.plain.param_groups]
            rates.add(pair.oss.param_groups[1]["lr"])
        assert len(rates) > 1

    # Closures, hooks and zero_grad.
    pair = twins()
    calls = []
    pair.oss.register_step_post_hook(lambda *args: calls.append("hook"))

    def closure():
        calls.append("closure")
        assert torch.is_grad_enabled()
        pair.backward(0)
        return torch.tensor(3.5)

    assert pair.oss.step(closure).item() == 3.5 and calls == ["closure", "hook"]
    pair.plain.step()
    pair.assert_equal()
    pair.oss.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in pair.model.parameters())
    pair.oss.zero_grad()
    assert all(p.grad is None for p in pair.model.parameters())

    # Named parameters, some of them without a gradient.
    model = seeded(float_mlp)
    oss = OSS(model.named_parameters(), torch.optim.AdamW)
    model.first.weight.grad = torch.ones_like(model.first.weight)
    before = [p.detach().clone() for p in model.parameters()]
    oss.step()
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert changed == [True, *[False] * 4] and same_on_all_ranks([model.first.weight])
    assert oss.param_groups[0]["param_names"][0] == "first.weight"


@pytest.mark.filterwarnings("error::FutureWarning")  # of what a newer torch deprecates
@on_ranks(1, 3)
def test_clipping_uses_the_norm_of_all_gradients(rank):
    for norm_type in (1.0, 2, 3.0, math.inf):
        pair = twins()
        for step, max_norm in enumerate([0.1, 1e9]):
            pair.backward(step)
            for ddp, _ in pair.sides():
                ddp.module.middle.bias.grad = None
            mine = pair.oss.clip_grad_norm(max_norm, norm_type)
            other = torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), max_norm, norm_type)
            torch.testing.assert_close(mine, other)
            assert len(set(gathered(mine.item()))) == 1
            for p, q in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
    # Beside frozen weights of a dtype that torch doesn't promote.
    frozen = torch.nn.Parameter(torch.zeros(4, dtype=torch.float8_e4m3fn), requires_grad=False)
    (trained,) = weights(4)
    trained.grad = torch.ones(4)
    assert OSS([frozen, trained], torch.optim.SGD, lr=0.1).clip_grad_norm(1.0) == 2.0


@on_ranks(3)
def test_nonfinite_values_of_one_rank_are_reported_on_all(rank):
    # A norm that is not finite.
    for norm_type, value in each([2.0, math.inf], [math.nan, math.inf]):
        params = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
        oss = OSS(params, torch.optim.SGD, lr=1.0)
        for param in params:
            param.grad = torch.ones(4)
        params[0].grad[1] = value
        with pytest.raises(RuntimeError, match="can't be clipped"):
            oss.clip_grad_norm(1.0, norm_type, error_if_nonfinite=True)
        assert torch.equal(params[1].grad, torch.ones(4))
        assert str(oss.clip_grad_norm(1.0, norm_type).item()) == str(value)
    with pytest.raises(ValueError, match="norm_type"):
        oss.clip_grad_norm(1.0, 0.0)

    # A scaler that found an overflow on only one rank.
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    oss = OSS(params, torch.optim.SGD, lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for param in params:
        param.grad = torch.full((4,), math.inf if rank == 1 else 1.0)
    with pytest.raises(RuntimeError, match="non-finite gradients on rank 1 only, of 3 ranks"):
        scaler.step(oss)
    assert torch.equal(params[0], torch.ones(4))


@on_ranks(1, 2)
def test_grad_scaler(rank):
    for fused, clip in each([False, True], [False, True]):
        pair = twins(torch.optim.Adam, {"fused": fused})
        scalers = [torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=2) for _ in range(2)]
        for step, scale in enumerate([1000.0, 2000.0, 2000.0, 1000.0, 1000.0, 2000.0]):
            for scaler, (ddp, optimizer) in zip(scalers, pair.sides(), strict=True):
                optimizer.zero_grad()
                loss = ddp(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().sum()
                scaler.scale(loss * (math.inf if step == 3 else 1.0)).backward()
                if clip:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
            assert [scaler.get_scale() for scaler in scalers] == [scale, scale]
            # The fused kernel divides by the scale differently.
            pair.assert_equal(**({"rtol": 1e-5, "atol": 1e-6} if fused and not clip else {}))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@on_ranks(2)
def test_arguments_and_sparse_gradients(rank):
    weight, bias = weights(3, 2)
    oss = OSS([weight])
    named, twice = [("weight", weight), ("bias", bias), ("tied", weight)], [[weight], [bias, weight]]
    assert_each_raises(
        (lambda: OSS(weights(2), torch.nn.Linear), TypeError, "Optimizer, or a function that makes one; got <class"),
        (lambda: OSS(weights(2), "AdamW"), TypeError, "or a function that makes one; got 'AdamW'"),
        (lambda: OSS(weights(2), torch.optim.SGD(weights(2))), TypeError, "object of class SGD: pass the class itself"),
        (lambda: OSS(weights(2), OSS), TypeError, "not OSS itself"),
        (lambda: OSS(weights(2), torch.optim.LBFGS), TypeError, "LBFGS uses all parameters together"),
        (lambda: OSS(weights(2), broadcast_buffer_size=0), ValueError, "a number of elements, or -1; got 0"),
        (lambda: OSS(weights(2), broadcast_buffer_size=None), ValueError, "a number of elements, or -1; got None"),
        (lambda: OSS(weights(2), broadcast_fp16="no"), TypeError, "broadcast_fp16 must be True or False, got 'no'"),
        (lambda: OSS([]), ValueError, "empty parameter list"),
        (lambda: OSS(weights(2)[0]), TypeError, "iterable of Tensors"),
        (lambda: OSS(torch.nn.Linear(2, 2)), TypeError, "got torch.nn.modules.linear.Linear: pass its parameters()"),
        (lambda: OSS(weights(2), torch.optim.SGD, lr=-1.0), ValueError, "Invalid learning rate"),
        (lambda: OSS(weights(2), torch.optim.SGD, speed=1.0), TypeError, "neither OSS nor SGD has an argument 'speed'"),
        (lambda: OSS(weights(2), optimizer=torch.optim.SGD), TypeError, "'optimizer'; did you mean 'optim'?"),
        (lambda: OSS(weights(2), optimizer_class=torch.optim.SGD), TypeError, "ZeroRedundancyOptimizer's: give optim="),
        (lambda: OSS(named), ValueError, "parameter 2 of group 0 ('tied') is given twice"),
        (lambda: OSS([{"params": params} for params in twice]), ValueError, "more than one parameter group"),
        (lambda: oss.add_param_group({"params": [bias] * 2}), ValueError, "parameter 1 of group 1 is given twice"),
    )
    assert len(oss.param_groups) == 1 and list(oss.param_to_rank) == [weight]

    # Sparse gradients.
    named = [("dense", weights(3)[0]), ("embedding", weights((4, 2))[0])]
    oss = OSS(named, torch.optim.SGD, lr=1.0)
    named[0][1].grad = torch.ones(3)
    named[1][1].grad = torch.ones(4, 2).to_sparse()
    text = "OSS does not support sparse gradients, and that of parameter 1 of group 0 ('embedding') is sparse"
    assert_each_raises((oss.step, RuntimeError, text), (lambda: oss.clip_grad_norm(1.0), RuntimeError, text))
    assert torch.equal(named[0][1], torch.ones(3))
    dist.barrier()


@on_ranks(3)
def test_ranks_that_differ(rank):
    def frozen():
        return [p.requires_grad_(p.dim() > 1) for p in weights((2, 3), 4)]

    for odd, words in (
        (
            weights((2, 3), 5),
            "On rank 1 it is parameter 1 of group 0: float32[5] on cpu device 0, trainable, on rank 0 parameter 1 of "
            "group 0: float32[4] on cpu device 0, trainable.",
        ),
        (weights((2, 3), 4, dtype=torch.float64), "it is parameter 0 of group 0: float64[2, 3]"),
        (weights((2, 3)), "1 on rank 1, 2 on rank 0. The first that only rank 0 has is parameter 1"),
        (weights((2, 3), 4, 1), "The first that only rank 1 has is parameter 2 of group 0: float32[1]"),
        (frozen(), "float32[4] on cpu device 0, frozen"),
        ([{"params": [p]} for p in weights((2, 3), 4)], "it is parameter 0 of group 1: float32[4]"),
    ):
        own = odd if rank == 1 else weights((2, 3), 4)
        assert_each_raises((lambda own=own: OSS(own), RuntimeError, words))


class WithOwnOption(torch.optim.SGD):
    """Its groups must say something that no default says, as Muon's variants ask for `use_muon`."""

    def __init__(self, params, lr):
        groups = [dict(group) for group in params]
        for group in groups:
            group["lr"] = lr * (2 if group["use_own"] else 1)
        super().__init__(groups, lr)


@on_ranks(1, 3)
def test_groups_with_options_that_the_class_requires(rank):
    tensors = weights(3, 5, 2)
    whole = [p.detach().clone() for p in tensors]
    oss = OSS(({"params": [p], "use_own": i == 1} for i, p in enumerate(tensors[:2])), WithOwnOption, lr=0.5)
    oss.add_param_group({"params": tensors[2:], "use_own": True, "lr": 1.0})
    for _ in range(2):
        for p in tensors:
            p.grad = torch.full_like(p, 2.0)
        oss.step()
    for p, before, lr in zip(tensors, whole, (0.5, 1.0, 1.0), strict=True):
        assert torch.equal(p.detach(), before - 2 * lr * 2.0)
    with pytest.raises(KeyError, match="use_own"):
        OSS(weights(2), WithOwnOption, lr=0.5)
    # As in torch, the program's dicts become the groups.
    given = [{"params": [p]} for p in seeded(Mlp).parameters()]
    optimizer = OSS(given, torch.optim.SGD, lr=0.1)
    assert all(group is own for group, own in zip(optimizer.param_groups, given, strict=True))
    with pytest.raises(TypeError, match="all must be dicts"):
        OSS([*given, given[0]["params"][0]], torch.optim.SGD, lr=0.1)


@on_ranks(2)
def test_errors_of_one_rank_and_differences_between_ranks(rank):
    # A class that refuses a parameter: the same error on all ranks, whoever would have owned it.
    class Picky(torch.optim.SGD):
        """Refuses matrices, and on one rank anything while it is broken."""

        broken = False

        def __init__(self, params, **options):
            super().__init__(params, **options)
            if any(param.dim() == 2 for group in self.param_groups for param in group["params"]):
                raise ValueError("no matrices")
            if Picky.broken and rank == 1:
                raise MemoryError("no memory")

    frozen = weights(9, 4)
    thawing = OSS([frozen[0], frozen[1].requires_grad_(False)], Picky, lr=1.0)
    frozen[1].requires_grad_(True)
    oss = OSS(weights(9, 4), Picky, lr=1.0)
    matrices = [weights((9, 9), 4), {"params": weights((2, 2))}]
    refused = "Picky refuses parameter 0 of group {}, of shape [{}]: no matrices"
    assert_each_raises(
        (lambda: OSS(matrices[0], Picky, lr=1.0), ValueError, refused.format(0, "9, 9")),
        (lambda: oss.add_param_group(matrices[1]), ValueError, refused.format(1, "2, 2")),
    )
    # An error on one rank reaches all.
    Picky.broken = True
    error = MemoryError if rank == 1 else RuntimeError
    text = "no memory" if rank == 1 else "OSS failed on other ranks: rank 1: MemoryError: no memory"
    assert_each_raises(
        (lambda: OSS(weights(9, 4), Picky, lr=1.0), error, text),
        (lambda: oss.add_param_group({"params": weights(2)}), error, text),
        (thawing.refresh_trainable, error, text),
    )
    Picky.broken = False
    # A group that rank 1 already has.
    again = {"params": oss.param_groups[0]["params"] if rank == 1 else weights(3)}
    error = ValueError if rank == 1 else RuntimeError
    assert_each_raises((lambda: oss.add_param_group(again), error, "some parameters appear in more than one"))
    assert len(oss.param_groups) == 1 and list(thawing.param_to_rank) == frozen[:1]

    # Ranks that thaw or add different parameters.
    params = weights(3, 2)
    params[1].requires_grad_(False)
    oss = OSS(params)
    params[1].requires_grad_(rank == 1)
    assert_each_raises((oss.refresh_trainable, RuntimeError, "On rank 1 it is parameter 1 of group 0"))
    params[1].requires_grad_(False)
    more = {"params": weights(7 + rank)}
    assert_each_raises((lambda: oss.add_param_group(more), RuntimeError, "parameter 0 of group 1: float32[8]"))
    assert len(oss.param_groups) == 1 and list(oss.param_to_rank) == params[:1]
    oss.refresh_trainable()
