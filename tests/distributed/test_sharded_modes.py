"""ShardedDataParallel with other features and changes between steps; its memory is its share and little more."""

import gc
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import torchddp
from tests.harness import each, on_ranks, over_both
from tests.models import Recurrent, same_on_all_ranks, seeded
from tests.oss import assert_same_state, twins, whole_state
from tests.sharded import WIDTH, Net, Pair, batch_of, loss_of, make_pair, reference_of, small_net
from tests.shm_backend import BACKEND
from tests.whole_buckets import WholeSharded
from torchddp.optim import OSS, ShardedGradScaler

SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})


def assert_all_equal(mine, theirs):
    torch.testing.assert_close([*mine], [*theirs], rtol=0, atol=0)


@on_ranks(3)
def test_several_optimizers(rank):
    one, other = seeded(Net), seeded(Net)

    def parts(net):
        late = [*net.last.parameters(), *net.wide.parameters()]
        return [p for p in net.parameters() if all(p is not q for q in late)], late

    optimizers = [OSS(parts(one)[0], torch.optim.AdamW, lr=0.01), OSS(parts(one)[1], torch.optim.SGD, lr=0.1)]
    plain = [torch.optim.AdamW(parts(other)[0], lr=0.01), torch.optim.SGD(parts(other)[1], lr=0.1)]
    model, reference = torchddp.ShardedDataParallel(one, optimizers), reference_of(other, {}, {})
    for step in range(10):
        for ddp, opts in ((model, optimizers), (reference, plain)):
            loss_of(ddp(batch_of(rank, step))).backward()
            for optimizer in opts if step % 3 else opts[:1]:
                optimizer.step()
            ddp.zero_grad()
    assert_all_equal(model.parameters(), reference.parameters())


@on_ranks(2)
def test_loss_scaling_skips_a_step_on_all_ranks(rank):
    for unscale in each([True, False]):
        pair, scales = make_pair(*SGD, make=small_net), []
        scalers = [
            kind("cpu", init_scale=2.0**10, growth_interval=3) for kind in (ShardedGradScaler, torch.amp.GradScaler)
        ]
        for step in range(12):
            for (model, optimizer), scaler in zip(pair.sides(), scalers, strict=True):
                loss = loss_of(model(batch_of(rank, step)))
                # One parameter's gradient overflows on its owner only.
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
        assert same_on_all_ranks([torch.tensor(scales)]) and scales[2] == 2.0**9
    # torch's scaler is refused, because ranks must agree.
    loss = loss_of(pair.model(batch_of(rank, 0))) + pair.model.module.norm.bias[0] * float("inf")
    scalers[1].scale(loss).backward()
    with pytest.raises(RuntimeError, match="ShardedGradScaler"):
        scalers[1].step(pair.oss)
    # Also if a rank owns nothing.
    layer = nn.Linear(WIDTH, 1, bias=False)
    oss = OSS(layer.parameters(), torch.optim.SGD, lr=0.1)
    model = torchddp.ShardedDataParallel(layer, oss)
    scalers[1].scale(model(batch_of(rank, 0)).sum()).backward()
    with pytest.raises(RuntimeError, match="no gradients on rank 1 only, of 2 ranks: .* use .*ShardedGradScaler"):
        scalers[1].step(oss)
    # 16-bit gradients are refused on all ranks, though only their owners have them.
    layer = nn.Linear(WIDTH, 1, bias=False).half()
    oss = OSS(layer.parameters(), torch.optim.SGD, lr=0.1)
    model, scaler = torchddp.ShardedDataParallel(layer, oss), ShardedGradScaler("cpu")
    scaler.scale(model(batch_of(rank, 0).half()).sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(oss)


@on_ranks(2)
def test_buffers(rank):
    for broadcast in each([True, False]):
        pair = make_pair(
            *SGD,
            make=lambda: nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)),
            reference_options={"forward_sync_buffers": broadcast},
            broadcast_buffers=broadcast,
        )
        pair.train_alike(range(10))
        assert_all_equal(pair.model.module.buffers(), pair.reference.module.buffers())
        assert not same_on_all_ranks([pair.model.module[1].running_mean])  # each rank has its last forward's


def middle_frozen():
    net = small_net()
    net.middle.requires_grad_(False)
    return net


@on_ranks(2, 3)
def test_frozen_at_first_and_a_group_added_later():
    for adds in each([False, True]):
        groups = (lambda net: [p for p in net.parameters() if p.requires_grad]) if adds else nn.Module.parameters
        pair = make_pair(make=middle_frozen, groups=groups)
        pair.train(range(3))
        for model, optimizer in pair.sides():
            model.module.middle.requires_grad_(True)
            if adds:
                optimizer.add_param_group({"params": model.module.middle.parameters(), "lr": 0.001})
        pair.rewrap()
        pair.train_alike(range(3, 8))


@on_ranks(2)
def test_parameters_whose_memory_changes(rank):
    # Another dtype.
    pair = make_pair(torch.optim.SGD, {"lr": 0.1})
    pair.train(range(3))
    assert pair.model.to(torch.float64) is pair.model
    pair.reference = TorchDDP(pair.reference.to(torch.float64).module)
    for step in range(3, 6):
        for model, _ in pair.sides():
            loss_of(model(batch_of(rank, step).double())).backward()
        pair.step()
    pair.assert_equal()
    assert pair.model.module.first.weight.dtype == torch.float64

    # By user code.
    for overlap, fp16 in each([(True, False), (False, False), (True, True)]):
        pair = make_pair(overlap_gather=overlap, oss_options={"broadcast_fp16": fp16})
        pair.train(range(2))
        for model, _ in pair.sides():
            weight = model.module.middle.weight
            weight.data = weight.detach().clone() * 0.5
        given = pair.model.module.middle.weight.data
        values = given.clone()
        pair.train(range(2, 6))
        assert given.equal(values)  # on every rank, or they would differ if the program gives it again
        if fp16:
            continue  # rounds what it sends
        pair.assert_equal()
        pair.model.share_memory()  # as a queue of torch.multiprocessing does with what it sends
        pair.train_alike(range(6, 9))


class Tied(nn.Module):
    """One weight in two layers, of which one may be recomputed."""

    def __init__(self, is_checkpointed=False):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.last.weight = self.first.weight
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        hidden = checkpoint(self.first, x, use_reentrant=False) if self.is_checkpointed else self.first(x)
        return self.last(torch.tanh(hidden))


@on_ranks(2)
def test_models_whose_parameters_are_used_in_other_ways():
    for make in each([lambda: Recurrent(16, 24), Tied, lambda: Tied(True)]):
        pair = make_pair(make=make, overlap_gather=True, transport="c10d")
        pair.train_alike(range(10))
    assert pair.model.module.last.weight is pair.model.module.first.weight
    # Code of torch.jit would read parameters on their way.
    pair = make_pair(make=lambda: torch.jit.script(nn.Linear(WIDTH, 3)), transport="c10d")
    pair.train_alike(range(3))
    assert not pair.model.overlap_gather


@on_ranks(2)
def test_saved_parameters_and_weights_at_startup(rank, tmp_path):
    # Saved parameters don't include their neighbors.
    pair = make_pair()
    pair.train(range(1))
    torch.save(pair.model.module.last.weight, tmp_path / str(rank))
    assert (tmp_path / str(rank)).stat().st_size < pair.model.module.last.weight.nbytes + 4096

    # Weights at startup.
    net = seeded(small_net, rank)
    before = net.first.weight.detach().clone()
    oss = OSS(net.parameters(), torch.optim.SGD, lr=0.1)
    model = torchddp.ShardedDataParallel(net, oss, sync_models_at_startup=False)
    assert torch.equal(model.module.first.weight, before)  # not broadcast
    assert model.reducer.transport_name == "shm"
    loss_of(model(batch_of(rank, 0))).backward()
    oss.step()
    assert same_on_all_ranks(list(model.parameters()))
    net = seeded(Net, 10 + rank)
    model = torchddp.ShardedDataParallel(net, OSS(net.parameters(), torch.optim.SGD, lr=0.1))
    assert same_on_all_ranks(list(model.parameters()))


@pytest.mark.rest_is_thorough("True")
@pytest.mark.parametrize("overlap", [True, False])
@on_ranks(2)
def test_compiled(rank, overlap):
    pair = make_pair(make=small_net, overlap_gather=overlap, transport="c10d")
    compiled = torch.compile(pair.model, backend="eager")
    for step in range(6):
        for model in (compiled, pair.reference):
            loss_of(model(batch_of(rank, step))).backward()
        pair.step()
    pair.assert_equal()


@on_ranks(2)
def test_compiled_inside():
    # The whole module, and one of two.
    for make, name in each([(small_net, ""), (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), small_net()), "1")]):
        pair, compiled = make_pair(make=make, transport="c10d"), CompileCounter()
        pair.model.module.get_submodule(name).compile(backend=compiled)
        pair.train(range(2))
        once = compiled.frame_count
        pair.train(range(2, 5))
        assert compiled.frame_count == once > 0 and not pair.model.overlap_gather
        pair.assert_equal()


@on_ranks(2, backend=BACKEND)
def test_the_shm_backend():
    for pair in each([twins(), make_pair()]):
        pair.train_alike(range(3))
        assert_same_state(whole_state(pair.oss), pair.plain.state_dict())


@over_both
@on_ranks(3)
def test_a_group_of_some_ranks(rank, transport):
    group = dist.new_group([0, 2])
    one, other = seeded(small_net), seeded(small_net)
    if rank == 1:
        with pytest.raises(ValueError, match="rank 1 is not in the process group"):
            OSS(one.parameters(), group=group)
        return
    oss = OSS(one.parameters(), torch.optim.SGD, lr=0.1, group=group)
    assert (oss.rank, oss.world_size, {*oss.param_to_rank.values()}) == (rank // 2, 2, {0, 1})
    model = torchddp.ShardedDataParallel(one, oss, group, transport=transport)
    pair = Pair(model, oss, TorchDDP(other, process_group=group), torch.optim.SGD(other.parameters(), lr=0.1))
    pair.train_alike(range(5))


@over_both
@on_ranks(2)
def test_unwrapped_module_has_its_own_memory_and_no_hooks(rank, transport):
    pair = make_pair(torch.optim.AdamW, {"lr": 0.01}, transport=transport)
    pair.train(range(3))
    module, wrapper = pair.model.module, weakref.ref(pair.model)
    assert pair.model.unwrap() is module
    pair.oss.consolidate_state_dict()
    pair.model = None
    assert wrapper() is None, "something still holds the wrapper"
    assert_all_equal(module.parameters(), pair.reference.parameters())
    assert all(p.grad is None and p.untyped_storage().nbytes() == p.nbytes for p in module.parameters())
    assert not any(part._forward_pre_hooks for part in module.modules())
    if rank == 0:  # on one rank: a leftover hook would wait for the other
        loss_of(module(batch_of(rank, 9))).backward()
        assert all(param.grad is not None for param in module.parameters())
        assert len(pair.oss.state_dict()["state"]) == len(list(small_net().parameters()))


@over_both
@on_ranks(2)
def test_nothing_waits_for_the_garbage_collector(rank, transport):
    gc.disable()
    pair = make_pair(transport=transport)
    pair.train(range(2))
    refs = [*map(weakref.ref, (pair.model, pair.oss, *pair.model.parameters()))]
    pair.backward(2)
    pair.oss.step()  # its messages are on their way
    pair = None
    dist.barrier()
    assert not any(ref() for ref in refs)


@on_ranks(2)
def test_a_step_needs_the_wrapper(rank):
    pair = make_pair()
    pair.train(range(2))
    pair.backward(2)
    optimizer, pair = pair.oss, None
    gc.collect()
    with pytest.raises(RuntimeError, match="no longer exists"):
        optimizer.step()
    assert optimizer.local_state_dict()["state"]


def one_after_the_other(rank, action):
    """Ranks act in turn, so that one rank's change would be visible to the next."""
    for turn in range(dist.get_world_size()):
        if turn == rank:
            action()
        dist.barrier()


@on_ranks(2, 3)
def test_changes_by_all_ranks_for_evaluation_or_by_one_rank(rank):
    # A change by all ranks takes effect once, like an average of weights: each rank saves the weights, replaces them,
    # and restores them.
    pair = make_pair()
    params, others = list(pair.model.module.parameters()), list(pair.reference.module.parameters())
    averaged = AveragedModel(pair.model.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(5):
        pair.train(range(step, step + 1))
        averaged.update_parameters(pair.model.module)
        average = [p.detach() for p in averaged.parameters()]
        kept = []
        one_after_the_other(rank, lambda kept=kept: kept.extend(p.detach().clone() for p in params))
        one_after_the_other(rank, lambda new=average: torch._foreach_copy_([p.data for p in params], new))
        assert all(map(torch.equal, params, average))
        one_after_the_other(rank, lambda kept=kept: torch._foreach_copy_([p.data for p in params], kept))
        one_after_the_other(rank, lambda: torch._foreach_mul_([p.data for p in (*params, *others)], 0.75))
        pair.assert_equal()
    pair.train_alike(range(5, 8))

    # Of changes by one rank, only the owner's are kept.
    pair = make_pair(torch.optim.SGD, {"lr": 0.0}, make=small_net)
    params = list(pair.model.module.parameters())
    before = [p.detach().clone() for p in params]
    if rank == 0:
        for param in params:
            param.data.add_(1)
    dist.barrier()
    for param, value in zip(params, before, strict=True):
        assert torch.equal(param, value + 1 if rank == 0 else value)
    pair.train(range(1))
    for param, value in zip(params, before, strict=True):
        assert torch.equal(param, value + 1 if pair.oss.param_to_rank[param] == 0 else value)
    assert same_on_all_ranks(params)


@on_ranks(2)
def test_changes_of_all_kinds(rank):
    # Freezing and thawing move parameters to other memory; a frozen one doesn't keep its neighbors' memory.
    pair = make_pair(reference_options={"find_unused_parameters": True}, auto_refresh_trainable=False)
    weight = pair.model.module.last.weight
    for step in range(8):
        before = weight.data_ptr()
        for model, _ in pair.sides():
            model.module.last.weight.requires_grad = bool(step % 2)
        pair.model.refresh_trainable()
        assert weight.data_ptr() != before
        pair.train_alike(range(step, step + 1))

    # A refused refresh leaves the owners as they are.
    pair = make_pair(make=small_net)
    pair.model.module.requires_grad_(False)
    with pytest.raises(RuntimeError, match="no parameter of the module requires grad"):
        pair.model.refresh_trainable()
    pair.model.module.requires_grad_(True)
    pair.train_alike(range(2))

    # New parameters get rank 0's values, as all do at startup.
    for sends in each([True, False]):
        pair = make_pair(make=small_net, sync_models_at_startup=sends)
        extra = nn.Parameter(torch.full((3,), float(rank)))
        pair.model.module.register_parameter("extra", extra)
        pair.oss.add_param_group({"params": [extra]})
        assert extra.tolist() == [0.0 if sends else float(rank)] * 3
        assert "extra" in [spec.name for spec in pair.model.session.specs]

    # Other parameters in place of the optimizer's.
    pair = make_pair(make=small_net)
    module = pair.model.module
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match=r"add_param_group\(\) for new ones, such as .*assign=True"):
        pair.model(batch_of(rank, 0))
    pair.oss.add_param_group({"params": list(module.parameters())})
    loss_of(pair.model(batch_of(rank, 0))).backward()
    pair.assert_sharded()
    pair.oss.step()
    assert same_on_all_ranks(list(module.parameters()))


def even(width):
    """Layers that divide evenly among ranks: 36 of `width` squared elements."""
    layers = [nn.Linear(width, width, bias=False) for _ in range(36)]
    return nn.Sequential(*itertools.chain(*((layer, nn.Tanh()) for layer in layers)))


@pytest.mark.rest_is_thorough("2-*", "3-alone-c10d")
@over_both
@pytest.mark.parametrize("width", [128, 520], ids=["in-buckets", "alone"])
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow), 4])
@on_ranks()
def test_each_rank_holds_its_share(rank, world_size, width, transport):
    net = even(width)
    oss = OSS(net.parameters(), torch.optim.AdamW, lr=0.01)
    # A bucket per layer, so that buffers are small compared with the model.
    model = torchddp.ShardedDataParallel(net, oss, transport=transport, reduce_buffer_size=128 * 128)
    # No large gradient of another rank's is left at the end of backward.
    foreign, alive = [p for p in net.parameters() if oss.param_to_rank[p] != rank], []
    net[0].register_full_backward_hook(lambda *_: alive.append(sum(p.grad is not None for p in foreign)))
    for _ in range(3):
        loss_of(model(torch.randn(4, width, requires_grad=True))).backward()
        grads = sum(p.grad.nbytes for p in net.parameters() if p.grad is not None)
        held = model.reducer.bucket_memory_bytes
        oss.step()
        oss.zero_grad()
    storages = [t.untyped_storage() for entry in oss.state.values() for t in entry.values() if t.numel() > 1]
    state = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    share, whole = 1 / world_size, sum(p.nbytes for p in net.parameters())
    assert grads / whole == pytest.approx(share) and state / (2 * whole) == pytest.approx(share)
    # Other ranks' small gradients use temporary memory, of which eight blocks are kept.
    assert share <= held / whole <= share + (9 / 36 if width == 128 else 0)
    assert len(alive) == 3
    assert width == 128 or transport == "c10d" or max(alive) == 0


@on_ranks(2)
def test_the_device_code_path_gives_the_same_bits(rank, monkeypatch):
    monkeypatch.setattr(torchddp, "ShardedDataParallel", WholeSharded)
    for transport in each(["shm", "c10d"]):
        pair = make_pair(torch.optim.AdamW, transport=transport)
        assert type(pair.model) is WholeSharded
        for step in range(6):
            if step % 2:
                for model, _ in pair.sides():
                    with model.no_sync():
                        loss_of(model(batch_of(rank, 50 + step))).backward()
            pair.backward(step)
            pair.assert_sharded()
            pair.step(set_to_none=step % 3 == 0)
        pair.assert_equal()
