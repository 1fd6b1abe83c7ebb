"""torchddp.optim.OSS trains as the plain optimizer does: schedulers, closures, clipping, loss scaling, messages."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.optim import lr_scheduler

from tests.harness import each, gathered, on_ranks
from tests.models import Mlp, same_on_all_ranks, seeded
from tests.oss import assert_same_state, float_mlp, twins, two_groups, whole_state
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
def test_twenty_steps_are_those_of_the_plain_optimizer(rank, optim, options):
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


@on_ranks(3)
def test_small_messages_and_other_layouts_of_memory(rank):
    def transposed():
        model = Mlp(dtype=torch.float32)
        for layer in (model.first, model.last):
            layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t())
        assert not model.first.weight.is_contiguous()
        return model

    for size in (1, 100, 500):
        pair = twins(make=transposed, broadcast_buffer_size=size)
        pair.train_alike(range(3))


@on_ranks(2)
def test_every_message_is_started_before_one_is_waited_for(rank, monkeypatch):
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
def test_dtypes_that_no_backend_has(rank):
    params = [torch.nn.Parameter(torch.ones(5, dtype=t)) for t in (torch.bfloat16, torch.complex64, torch.float64)]
    oss = OSS(params, torch.optim.SGD, lr=0.5)
    for param in params:
        param.grad = torch.ones_like(param)
    oss.step()
    assert all(torch.equal(p, torch.full_like(p, 0.5)) for p in params)


@on_ranks(3)
def test_fp16_broadcast_leaves_all_replicas_with_the_same_rounded_values(rank):
    pair = twins(broadcast_fp16=True)
    pair.train(range(4))
    values = torch.cat([p.detach().flatten() for p in pair.model.parameters()])
    plain = torch.cat([p.detach().flatten() for p in pair.reference.parameters()])
    assert torch.equal(values, values.half().float()) and not torch.equal(values, plain)
    torch.testing.assert_close(values, plain, rtol=0.02, atol=0.005)
    assert same_on_all_ranks([values])


@on_ranks(2, backend="torchddp_shm")
def test_the_shm_backend(rank):
    pair = twins()
    pair.train_alike(range(3))
    assert_same_state(whole_state(pair.oss), pair.plain.state_dict())


@on_ranks(3)
def test_a_group_of_some_ranks(rank):
    group = dist.new_group([2, 0])
    param = torch.nn.Parameter(torch.ones(3))
    if rank == 1:
        with pytest.raises(ValueError, match="rank 1 is not in the process group"):
            OSS([param], group=group)
        return
    oss = OSS([param, torch.nn.Parameter(torch.ones(2))], torch.optim.SGD, group=group, lr=1.0)
    param.grad = torch.ones(3)
    oss.step()
    assert (oss.rank, oss.world_size, oss.param_to_rank[param], param.tolist()) == (rank // 2, 2, 0, [0.0] * 3)


@on_ranks(3)
def test_state_is_held_once(rank):
    pair = twins()
    pair.train(range(2))
    owned = {p for p, owner in pair.oss.param_to_rank.items() if owner == rank}
    assert set(pair.oss.state) == owned
    mine, whole = (
        sum(value.numel() for entry in optimizer.state.values() for value in entry.values())
        for optimizer in (pair.oss, pair.plain)
    )
    assert sum(gathered(mine)) == whole and mine < 0.7 * whole
    with pytest.raises(TypeError):
        pair.oss.param_to_rank[next(iter(owned))] = 5


SCHEDULERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),  # changes betas as well
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
}


@on_ranks(2)
def test_schedulers(rank):
    for kind, make in each(SCHEDULERS.items()):
        pair = twins(groups=two_groups)
        both = [make(pair.oss), make(pair.plain)]
        seen = set()
        for step in range(12):
            pair.train(range(step, step + 1))
            for scheduler in both:
                scheduler.step(*([1.0] if kind == "plateau" else []))
            assert [g["lr"] for g in pair.oss.param_groups] == [g["lr"] for g in pair.plain.param_groups]
            seen.add(pair.oss.param_groups[1]["lr"])
        pair.assert_equal()
        assert len(seen) > 1


@on_ranks(2)
def test_closures_hooks_and_zero_grad(rank):
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


@on_ranks(1, 3)
def test_clipping_is_that_of_all_gradients(rank):
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


@on_ranks(3)
def test_a_norm_that_is_not_finite_is_known_to_all_ranks(rank):
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
            # The fused kernel divides by the scale in its own way.
            pair.assert_equal(**({"rtol": 1e-5, "atol": 1e-6} if fused and not clip else {}))


@on_ranks(3)
def test_grad_scaler_ranks_that_disagree(rank):
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    oss = OSS(params, torch.optim.SGD, lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for param in params:
        param.grad = torch.full((4,), math.inf if rank == 1 else 1.0)
    with pytest.raises(RuntimeError, match="not finite on rank 1 only, of 3 ranks"):
        scaler.step(oss)
    assert torch.equal(params[0], torch.ones(4))


@on_ranks(2)
def test_named_parameters_of_which_some_have_no_gradient(rank):
    model = seeded(float_mlp)
    oss = OSS(model.named_parameters(), torch.optim.AdamW)
    model.first.weight.grad = torch.ones_like(model.first.weight)
    before = [p.detach().clone() for p in model.parameters()]
    oss.step()
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert changed == [True, *[False] * 4] and same_on_all_ranks([model.first.weight])
    assert oss.param_groups[0]["param_names"][0] == "first.weight"
