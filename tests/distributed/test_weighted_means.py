"""weigh(): gradients of ranks with unequal numbers of samples equal those of one process with all samples."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import torchddp
from tests.comm_hooks import live_on
from tests.fault.test_bad_input import Twice
from tests.harness import assert_each_raises, each, on_ranks, over_both
from tests.managers import FakeManager
from tests.models import assert_grads, batch, seeded
from torchddp import Checks, Precision
from torchddp import DistributedDataParallel as DDP
from torchddp.sync import accumulate

SAMPLES = [[3], [7], [0], [5]]  # by rank
MICROBATCHES = [[3, 1, 2], [2, 5, 0], [0, 0, 0], [1, 2, 2]]
SMALL = 0.001  # MiB: several buckets


class Net(nn.Module):
    """A model with gradients large enough for shared memory to reduce without a copy, and small ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh())
        self.head, self.other = nn.Linear(300, 2), nn.Linear(300, 2)

    def forward(self, x, other=False):
        hidden = self.body(x)
        return self.other(hidden) if other else self.head(hidden) + 0.0 * self.other(hidden)


def samples(rank, micro, count):
    return batch(rank, micro, count, 6, dtype=torch.float32)


def mean_loss(output):
    """The mean loss: NaN, with NaN gradients, for no samples."""
    return (output.square().sum(1) / output.shape[0]).sum() + output.new_zeros(()) / output.shape[0]


def of_all_ranks(counts, step=0):
    of = [(rank, 10 * step + m, n) for rank, micros in enumerate(counts) for m, n in enumerate(micros)]
    return torch.cat([samples(*each_) for each_ in of])


def reference(counts, step=0):
    """The gradients of one process with the samples of all ranks and microbatches."""
    model = Net()
    mean_loss(model(of_all_ranks(counts, step))).backward()
    return grads_of(model)


def run_step(model, rank, counts, step=0, scale=1):
    """A step of several microbatches, as users write it."""
    for micro, count in enumerate(counts[rank]):
        with nullcontext() if micro == len(counts[rank]) - 1 else model.no_sync():
            model.weigh(scale * count)
            mean_loss(model(samples(rank, 10 * step + micro, count))).backward()


def grads_of(model, where="grad"):
    return {name.removeprefix("module."): getattr(p, where) for name, p in model.named_parameters()}


def assert_same(model, want, rtol=2e-5, where="grad"):
    assert_grads(grads_of(model, where), want, rtol)


def check_steps(model, rank, counts=MICROBATCHES, steps=2, rtol=2e-5, scale=1):
    for step in range(steps):
        model.zero_grad()
        run_step(model, rank, counts, step, scale)
        assert_same(model, reference(counts, step), rtol)


@on_ranks(2)
def test_gradients_that_are_changed_between_backwards_of_a_step(rank):
    """Replaced or cleared, they are what the rest of it begins with. Scaled after a step began with them: an error."""
    model = DDP(Net())

    def begin(kept):
        if not kept:
            model.zero_grad()
        with model.no_sync():
            model.weigh(1)
            mean_loss(model(samples(rank, 7, 1))).backward()

    for kept in (False, True):
        begin(kept)
        for p in model.parameters():
            p.grad = None
        run_step(model, rank, MICROBATCHES[:2])
        assert_same(model, reference(MICROBATCHES[:2]))
    begin(True)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    run_step(model, rank, MICROBATCHES[:2])
    assert_same(model, reference(MICROBATCHES[:2]))
    begin(True)
    for p in model.parameters():
        p.grad.mul_(0.5)
    model.weigh(1)
    with pytest.raises(RuntimeError, match=rf"rank {rank}: the gradient of '.*' was changed between two backwards"):
        mean_loss(model(samples(rank, 0, 1))).backward()


HOOKS = {
    (None, default_hooks.allreduce_hook): 2e-5,
    (None, default_hooks.bf16_compress_hook): 0.04,
    (None, default_hooks.fp16_compress_hook): 0.01,
    "bf16": 0.04,
}


@on_ranks(4)
def test_hooks_and_16_bits_between_hosts(rank):
    """Also with weights that overflow 16-bit floats."""
    for hook, rtol in each(HOOKS.items()):
        check_steps(DDP(Net(), comm_hook=hook), rank, rtol=rtol, scale=30_000)
    model = DDP(Net())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    check_steps(model, rank, rtol=2e-5, scale=30_000)
    live_on("aabb", rank)
    for dtype in each([torch.bfloat16, torch.float16]):
        check_steps(DDP(Net(), transport="shm", precision=Precision(wire=dtype)), rank, rtol=0.02)


@over_both
@pytest.mark.usefixtures("cheap_messages")
@on_ranks(1, 2, 3, 4)
def test_large_gradients_and_those_of_a_hook(rank, world_size, transport):
    """Without a hook, a large gradient is weighted where autograd made it."""
    for layers, hook in each([[64, 1100], [300, 300, 300]], [default_hooks.allreduce_hook, None]):
        pairs = zip(layers[:-1], layers[1:], strict=True)
        model = DDP(nn.Sequential(*[nn.Linear(*pair, bias=False) for pair in pairs]), transport=transport)
        if hook is not None:
            model.register_comm_hook(None, hook)
        for step in range(3):
            model.zero_grad()
            inputs = [batch(r, step, 1 + r, layers[0], dtype=torch.float32) for r in range(world_size)]
            model.weigh(1 + rank)
            model(inputs[rank]).square().sum(1).mean().backward()
            whole = copy.deepcopy(model.module)
            whole.zero_grad()
            whole(torch.cat(inputs)).square().sum(1).mean().backward()
            assert_same(model, grads_of(whole))


@on_ranks(4)
def test_managers_calls_and_copies(rank):
    # Under a manager.
    manager = FakeManager()
    model = torchddp.fault_tolerance.DistributedDataParallel(manager, Net(), bucket_cap_mb=SMALL)
    for step in range(3):
        manager.start_quorum()
        model.zero_grad()
        run_step(model, rank, MICROBATCHES, step=step)
        assert manager.should_commit()
        assert_same(model, reference(MICROBATCHES, step=step))

    # The last call counts; a microbatch that the program dropped does not.
    for where in each(["grad", "main_grad"]):
        model = DDP(Net(), precision=Precision(main_grads=torch.float32 if where == "main_grad" else None))
        with model.no_sync():
            model.weigh(50)
            mean_loss(model(samples(rank, 7, 5))).backward()
        for p in model.parameters():
            setattr(p, where, None)
        model.weigh(99)
        run_step(model, rank, MICROBATCHES)
        assert_same(model, reference(MICROBATCHES), where=where)
    check_steps(copy.deepcopy(DDP(Net(), weighted=True)), rank, steps=1)


@over_both
@on_ranks(2)
def test_steps_without_any_weight(rank, transport):
    model = DDP(Net(), transport=transport, bucket_cap_mb=SMALL)
    zeros = DDP(Net(), transport=transport, checks=Checks(zero_weights="zeros"))
    for step in range(3):
        nothing = step % 2 == 0  # also in the first step, whose total scales the others
        for ddp in (model, zeros):
            ddp.zero_grad()
            ddp.weigh(0 if nothing else 1 + rank)
            loss = mean_loss(ddp(samples(rank, 10 * step, 0 if nothing else 1 + rank)))
            words = rf"rank {rank}, step {step + 1}: no rank .*weight above 0"
            with pytest.raises(ValueError, match=words) if nothing and ddp is model else nullcontext():
                loss.backward()
            if nothing:
                assert all(not grad.any() for grad in grads_of(ddp).values())
            else:
                assert_same(ddp, reference([[1], [2]], step=step))


@on_ranks(2)
def test_missing_and_wrong_weights(rank):
    model = DDP(Net(), weighted=True)
    model.zero_grad()
    mean_loss(model.module(samples(rank, 0, 2))).backward()  # bypasses the wrapper
    with pytest.raises(RuntimeError, match=rf"rank {rank}: weigh\(\) was called, but there are gradients of"):
        model.weigh(1)
    check_steps(model, rank, [[1], [2]], steps=1)
    model = DDP(Net())
    with model.no_sync():
        model.weigh(2)
        mean_loss(model(samples(rank, 0, 2))).backward()
        with pytest.raises(RuntimeError, match="got a second gradient after one weigh"):
            mean_loss(model(samples(rank, 0, 2))).backward()
    model.zero_grad()
    with model.no_sync():
        mean_loss(model(samples(rank, 0, 2))).backward()
    with pytest.raises(RuntimeError, match=rf"rank {rank}: weigh\(\) was called, but there are gradients of"):
        model.weigh(1)

    # A step is given up after a weigh() whose backward has not come, for example because the forward has raised.
    model = DDP(Net())
    with model.no_sync():
        model.weigh(2)
        mean_loss(model(samples(rank, 0, 2))).backward()
    model.weigh(2)
    check_steps(model, rank, [[1, 3], [2, 2]], steps=1)

    # A process group that is replaced within a step.
    model = DDP(Net())
    with model.no_sync():
        model.weigh(2)
        mean_loss(model(samples(rank, 0, 2))).backward()
    model.update_process_group(dist.new_group())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"rank {rank}: weigh\(\) was called, but there are gradients of"):
            model.weigh(2)
    check_steps(model, rank, [[1, 3], [2, 2]], steps=1)

    # A backward under no_sync() that would be reduced, because of a forward that has had no backward.
    model = DDP(Net())
    model(samples(rank, 0, 2))
    with pytest.raises(RuntimeError, match=rf"rank {rank}: a forward outside no_sync\(\) has had no backward"):
        for _ in accumulate(model, 2, weights=[1, 2]):
            mean_loss(model(samples(rank, 0, 2))).backward()
    with model.no_sync(), pytest.raises(RuntimeError, match="a forward outside no_sync"):
        model.weigh(2)
    check_steps(model, rank, [[1], [2]], steps=1)

    wrong, no_numbers = (-1, float("nan"), float("inf")), ("many", "3", b"3", None, torch.ones(2))
    others = (model.module, nn.parallel.DistributedDataParallel(Net()))
    weight = f"the weight on rank {rank} must be"
    assert_each_raises(
        *((partial(model.weigh, bad), ValueError, f"{weight} 0 or more, and finite") for bad in wrong),
        *((partial(model.weigh, bad), TypeError, f"{weight} a number") for bad in no_numbers),
        (partial(model.weigh, 1, loss="max"), ValueError, 'loss must be "mean" or "sum"'),
        (
            partial(DDP, Net(), checks=Checks(zero_weights="skip")),
            ValueError,
            'zero_weights=) must be "raise" or "zeros"',
        ),
        (partial(accumulate, model, 3, weights=[1, 2]), ValueError, "a weight for each of the 3 microbatches, got 2"),
        (partial(accumulate, model, 1, weights=iter([1])), TypeError, "weights must be a list with a number for each"),
        (partial(accumulate, model, 1, weights=[-1]), ValueError, f"rank {rank} must be 0 or more"),
        *((partial(accumulate, m, 1, weights=[1]), RuntimeError, "weights= needs a torchddp.Dist") for m in others),
    )
    model.weigh(torch.tensor([3]))
    mean_loss(model(samples(rank, 0, 3))).backward()


@over_both
@on_ranks(3)
def test_weights_are_sent_with_the_first_bucket(rank, transport):
    """One number per step. A new group has a new total."""

    def sent_bytes():
        return sum(payload for payload, _ in model.reducer.transport.traffic.values())

    sent = []
    model = DDP(Net(), transport=transport)
    for weighted in (False, False, False, True, True):  # buckets are rebuilt in the second step
        before = sent_bytes()
        model.zero_grad()
        if weighted:
            model.weigh(2 + rank)
        mean_loss(model(samples(rank, 0, 2))).backward()
        sent.append(sent_bytes() - before)
    assert sent[3] == sent[4] == sent[2] + 8

    pair = dist.new_group([0, 1])
    if rank < 2:
        model.update_process_group(pair)
        check_steps(model, rank, SAMPLES[:2], steps=1)


@on_ranks(2)
def test_gradients_whose_weights_are_unknown_and_large_totals(rank):
    # Thawed after the first microbatch of a step.
    for auto in each([False, True]):
        model = DDP(Net(), auto_refresh_trainable=auto)
        model.module.other.requires_grad_(False)
        model.refresh_trainable()
        run_step(model, rank, MICROBATCHES)
        model.zero_grad()
        model.module.other.requires_grad_(True)
        with model.no_sync():
            model.weigh(2)
            mean_loss(model(samples(rank, 0, 2), other=True)).backward()
        with pytest.raises(RuntimeError, match="other.weight and other.bias were|other.weight, other.bias were"):
            model(samples(rank, 0, 2)) if auto else model.refresh_trainable()
        model.zero_grad()
        if not auto:
            model.refresh_trainable()
        check_steps(model, rank, [[1], [2]], steps=1)

    # Unweighted gradients that were cleared or averaged.
    model = DDP(Net())
    for set_to_none in (True, False):
        model.zero_grad()
        with model.no_sync():
            mean_loss(model(samples(rank, 7, 2))).backward()
        model.zero_grad(set_to_none)
        run_step(model, rank, [[1], [2]])
        assert_same(model, reference([[1], [2]]))
    model.zero_grad()
    for count in range(2):  # a step of two microbatches without weights
        with model.no_sync() if count == 0 else nullcontext():
            mean_loss(model(samples(rank, count, 2))).backward()
    model.weigh(1)


@on_ranks(3)
def test_totals_that_grow_far_beyond_the_first(rank):
    """In float16, which ranges from 6e-8 to 65504, between hosts."""
    live_on("aab", rank)
    for first, later in each([(1e-3, 1e4), (1e5, 1e-6)]):
        model = DDP(Net(), transport="shm", precision=Precision(wire=torch.float16))
        for step, times in enumerate([first, later, later]):
            model.zero_grad()
            model.weigh(times * (1 + rank))
            mean_loss(model(samples(rank, 10 * step, 1 + rank))).backward()
        assert_same(model, reference([[1], [2], [3]], step=2), 0.02)


@over_both
@on_ranks(2)
def test_a_parameter_in_several_checkpoints_of_a_static_graph(rank, transport):
    shared_last = partial(seeded, partial(Twice, width=6))
    model = DDP(shared_last(), transport=transport, static_graph=True)
    for step in range(3):
        model.zero_grad()
        run_step(model, rank, SAMPLES[:2], step=step)
        whole = shared_last()
        mean_loss(whole(of_all_ranks(SAMPLES[:2], step))).backward()
        assert_same(model, grads_of(whole))
