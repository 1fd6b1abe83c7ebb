"""ShardedDataParallel with what else people use: several optimizers, saved state, loss scaling, frozen layers."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchddp
from tests.harness import on_ranks, run_ranks
from tests.models import Branches, batch, same_on_all_ranks, seeded
from tests.oss import assert_same_state
from tests.sharded import Net, Pair, batch_of, loss_of, make_pair, reference_of, small_net
from torchddp.optim import OSS, ShardedGradScaler


@on_ranks(3)
def test_several_optimizers(rank):
    one, other = seeded(Net), seeded(Net)

    def parts(net):
        late = [*net.last.parameters(), *net.wide.parameters()]
        return [p for p in net.parameters() if all(p is not q for q in late)], late

    optimizers = [OSS(parts(one)[0], torch.optim.AdamW, lr=0.01), OSS(parts(one)[1], torch.optim.SGD, lr=0.1)]
    plain = [torch.optim.AdamW(parts(other)[0], lr=0.01), torch.optim.SGD(parts(other)[1], lr=0.1)]
    model = torchddp.ShardedDataParallel(one, optimizers)
    reference = reference_of(other, {}, {})
    for step in range(10):
        for ddp, opts in ((model, optimizers), (reference, plain)):
            loss_of(ddp(batch_of(rank, step))).backward()
            for optimizer in opts if step % 3 else opts[:1]:
                optimizer.step()
            ddp.zero_grad()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.rest_is_thorough("1-AdamW", "3-AdamW", "4-Adafactor")
@pytest.mark.parametrize("optim", [torch.optim.AdamW, torch.optim.Adafactor])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_resume_on_another_number_of_ranks(world_size, optim, tmp_path):
    """The same batch on all ranks, so that gradients do not depend on their number."""

    def step(pair, index):
        for model, optimizer in pair.sides():
            loss_of(model(batch_of(0, index))).backward()
            optimizer.step()
            optimizer.zero_grad()

    def save(rank):
        pair = make_pair(optim, {"lr": 0.01})
        for index in range(10):
            step(pair, index)
        pair.oss.consolidate_state_dict(0)
        if rank == 0:
            assert_same_state(pair.oss.state_dict(), pair.plain.state_dict())
            torch.save({"model": pair.sharded.module.state_dict(), "optim": pair.oss.state_dict()}, tmp_path / "saved")

    def resume(rank):
        saved = torch.load(tmp_path / "saved")
        pair = make_pair(optim, {"lr": 0.5})
        for model, optimizer in pair.sides():
            model.module.load_state_dict(saved["model"])
            optimizer.load_state_dict(copy.deepcopy(saved["optim"]))
        for index in range(10, 20):
            step(pair, index)
        pair.assert_equal(**({} if world_size != 3 else {"rtol": 1e-5, "atol": 1e-6}))

    run_ranks(save, 2)
    run_ranks(resume, world_size)


@pytest.mark.parametrize("unscale", [True, False])
def test_loss_scaling_skips_on_all_ranks_what_one_found(unscale):
    def work(rank):
        pair = make_pair(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, make=small_net)
        scales = []
        scalers = [
            ShardedGradScaler("cpu", init_scale=2.0**10, growth_interval=3),
            torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3),
        ]
        for step in range(12):
            for (model, optimizer), scaler in zip(pair.sides(), scalers, strict=True):
                loss = loss_of(model(batch_of(rank, step)))
                # One parameter's gradient overflows: on its owner alone.
                if step in (2, 7):
                    loss = loss + model.module.norm.bias[0] * float("inf")
                scaler.scale(loss).backward()
                if unscale:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scalers[0].get_scale() == scalers[1].get_scale()
            scales.append(scalers[0].get_scale())
        pair.assert_equal()
        return scales

    mine, other = run_ranks(work, 2)
    assert mine == other and mine[2] == 2.0**9


@on_ranks(2)
def test_torchs_scaler_is_told_on_that_it_must_agree(rank):
    pair = make_pair(torch.optim.SGD, {"lr": 0.1}, make=small_net)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    model = pair.sharded
    scaler.scale(loss_of(model(batch_of(rank, 0))) + model.module.norm.bias[0] * float("inf")).backward()
    with pytest.raises(RuntimeError, match="ShardedGradScaler"):
        scaler.step(pair.oss)


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.last = nn.Linear(32, 3)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers(broadcast):
    def work(rank):
        one, other = seeded(WithBuffers), seeded(WithBuffers)
        oss = OSS(one.parameters(), torch.optim.SGD, lr=0.1)
        model = torchddp.ShardedDataParallel(one, oss, broadcast_buffers=broadcast)
        reference = TorchDDP(other, forward_sync_buffers=broadcast)
        pair = Pair(model, oss, reference, torch.optim.SGD(other.parameters(), lr=0.1))
        pair.train(range(10))
        pair.assert_equal()
        for mine, theirs in zip(one.buffers(), other.buffers(), strict=True):
            assert torch.equal(mine, theirs)
        return one.norm.running_mean.sum().item()

    sums = run_ranks(work, 2)
    model_sums_equal = sums[0] == sums[1]
    assert not model_sums_equal  # the last forward's own


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_parameters_that_some_ranks_or_none_use(rank, transport):
    one, other = seeded(Branches), seeded(Branches)
    oss = OSS(one.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.5)
    model = torchddp.ShardedDataParallel(one, oss, find_unused_parameters=True, transport=transport)
    reference = TorchDDP(other, find_unused_parameters=True)
    plain = torch.optim.AdamW(other.parameters(), lr=0.01, weight_decay=0.5)
    for step in range(12):
        branch = "left" if (rank + step) % 3 else "right"
        for ddp, optimizer in ((model, oss), (reference, plain)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ddp(batch(rank, step, 3, 4), branch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_static_graph(transport):
    pair = make_pair(static_graph=True, transport=transport)
    pair.train(range(10))
    pair.assert_equal()


@pytest.mark.parametrize("auto", [True, False])
@on_ranks(3)
def test_layers_frozen_and_thawed_in_turn(auto):
    pair = make_pair(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, auto_refresh_trainable=auto)
    for step in range(12):
        if step % 3 == 0:
            for model, _ in pair.sides():
                for layer, on in ((model.module.first, step % 2 == 0), (model.module.last, step % 2 == 1)):
                    layer.requires_grad_(on)
            if not auto:
                pair.sharded.refresh_trainable()
            pair.reference = reference_of(pair.reference.module, {}, {})
        pair.train(range(step, step + 1))
    pair.assert_equal()


@on_ranks(3)
def test_frozen_at_first():
    def make():
        net = small_net()
        net.middle.requires_grad_(False)
        return net

    pair = make_pair(make=make)
    pair.train(range(3))
    for model, _ in pair.sides():
        model.module.middle.requires_grad_(True)
    pair.reference = reference_of(pair.reference.module, {}, {})
    pair.train(range(3, 8))
    pair.assert_equal()


@on_ranks(2)
def test_a_group_added_later():
    def make():
        net = small_net()
        net.middle.requires_grad_(False)
        return net

    pair = make_pair(make=make, groups=lambda net: [p for p in net.parameters() if p.requires_grad])
    pair.train(range(3))
    for model, optimizer in pair.sides():
        model.module.middle.requires_grad_(True)
        optimizer.add_param_group({"params": model.module.middle.parameters(), "lr": 0.001})
    pair.reference = reference_of(pair.reference.module, {}, {})
    pair.train(range(3, 8))
    pair.assert_equal()


@on_ranks(2)
def test_moved_to_another_dtype(rank):
    pair = make_pair(torch.optim.SGD, {"lr": 0.1})
    pair.train(range(3))
    assert pair.sharded.to(torch.float64) is pair.sharded
    pair.reference.to(torch.float64)
    pair.reference = TorchDDP(pair.reference.module)
    for step in range(3, 6):
        for model, optimizer in pair.sides():
            loss_of(model(batch_of(rank, step).double())).backward()
            optimizer.step()
            optimizer.zero_grad()
    pair.assert_equal()
    assert pair.sharded.module.first.weight.dtype == torch.float64


@pytest.mark.parametrize("overlap", [True, False])
@on_ranks(2)
def test_memory_that_user_code_has_exchanged(overlap):
    pair = make_pair(overlap_gather=overlap)
    pair.train(range(2))
    for model, _ in pair.sides():
        weight = model.module.middle.weight
        weight.data = weight.detach().clone() * 0.5
    pair.train(range(2, 6))
    pair.assert_equal()


@on_ranks(2)
def test_recurrent_weights_that_no_dictionary_sees():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(16, 24, batch_first=True)
            self.last = nn.Linear(24, 2)

        def forward(self, x):
            return self.last(self.rnn(x[None])[0])

    pair = make_pair(make=Recurrent, overlap_gather=True, transport="c10d")
    pair.train(range(10))
    pair.assert_equal()


def test_saved_parameters_do_not_drag_their_neighbours_along(tmp_path):
    def work(rank):
        pair = make_pair()
        pair.train(range(1))
        torch.save(pair.sharded.module.last.weight, tmp_path / str(rank))
        return (tmp_path / str(rank)).stat().st_size, pair.sharded.module.last.weight.nbytes

    for size, wanted in run_ranks(work, 2):
        assert size < wanted + 4096


@pytest.mark.rest_is_thorough("True")
@pytest.mark.parametrize("overlap", [True, False])
@on_ranks(2)
def test_compiled(rank, overlap):
    pair = make_pair(make=small_net, overlap_gather=overlap, transport="c10d")
    compiled = torch.compile(pair.sharded, backend="eager")
    for step in range(6):
        loss_of(compiled(batch_of(rank, step))).backward()
        loss_of(pair.reference(batch_of(rank, step))).backward()
        for _, optimizer in pair.sides():
            optimizer.step()
            optimizer.zero_grad()
    pair.assert_equal()


@on_ranks(3)
def test_parameters_in_half_precision_on_their_way():
    pair = make_pair(torch.optim.SGD, {"lr": 0.1}, oss_options={"broadcast_fp16": True})
    pair.train(range(5))
    pair.assert_equal(rtol=0.02, atol=5e-3)
    values = torch.cat([p.detach().flatten() for p in pair.sharded.parameters() if p.dtype == torch.float32])
    assert torch.equal(values, values.half().float())
    assert same_on_all_ranks([values])


@on_ranks(2)
def test_activation_checkpointing():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(16, 32)
            self.last = nn.Linear(32, 3)

        def forward(self, x):
            hidden = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)
            return self.last(torch.tanh(hidden))

    pair = make_pair(make=Checkpointed, transport="c10d", overlap_gather=True)
    pair.train(range(8))
    pair.assert_equal()


@on_ranks(2)
def test_weights_tied_between_layers():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.last = nn.Linear(16, 16)
            self.last.weight = self.first.weight

        def forward(self, x):
            return self.last(torch.tanh(self.first(x)))

    pair = make_pair(make=Tied, transport="c10d", overlap_gather=True)
    pair.train(range(8))
    pair.assert_equal()
    assert pair.sharded.module.last.weight is pair.sharded.module.first.weight


@on_ranks(2)
def test_an_average_of_weights_sees_the_step():
    pair = make_pair(transport="c10d", overlap_gather=True)
    averages = [
        torch.optim.swa_utils.AveragedModel(m.module, avg_fn=lambda a, b, n: 0.9 * a + 0.1 * b) for m, _ in pair.sides()
    ]
    for step in range(8):
        pair.train(range(step, step + 1))
        for average, (model, _) in zip(averages, pair.sides(), strict=True):
            average.update_parameters(model.module)
    for mine, theirs in zip(averages[0].parameters(), averages[1].parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(3)
def test_a_group_of_some_ranks(rank, transport):
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    one, other = seeded(small_net), seeded(small_net)
    oss = OSS(one.parameters(), torch.optim.SGD, lr=0.1, group=group)
    model = torchddp.ShardedDataParallel(one, oss, group, transport=transport)
    pair = Pair(model, oss, TorchDDP(other, process_group=group), torch.optim.SGD(other.parameters(), lr=0.1))
    pair.train(range(5))
    pair.assert_equal()


@on_ranks(2)
def test_weights_of_each_ranks_own_at_startup(rank):
    net = seeded(small_net, rank)
    before = net.first.weight.detach().clone()
    oss = OSS(net.parameters(), torch.optim.SGD, lr=0.1)
    model = torchddp.ShardedDataParallel(net, oss, sync_models_at_startup=False)
    assert torch.equal(model.module.first.weight, before)
    assert model.reducer.transport_name == "shm"
    loss_of(model(batch_of(rank, 0))).backward()
    oss.step()
    assert same_on_all_ranks(list(model.parameters()))
