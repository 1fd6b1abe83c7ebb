"""ShardedDataParallel trains like torch's DistributedDataParallel with the plain optimizer; errors; a rank's memory."""

import copy
import ctypes
import gc
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchddp
from tests.harness import assert_each_raises, each, in_child, on_ranks, over_both, run_ranks, status_bytes, stay
from tests.models import same_on_all_ranks
from tests.sharded import batch_of, loss_of, make_pair, small_net
from torchddp import ShardedDataParallel
from torchddp.optim import OSS

OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 0.003}),
    (torch.optim.AdamW, {"lr": 0.003}),
    # It divides by almost zero where gradients cancel, unless its sums start above zero.
    (torch.optim.Adagrad, {"lr": 0.02, "initial_accumulator_value": 0.1}),
    (torch.optim.Adafactor, {"lr": 0.01}),
]
IDS = [optim.__name__ for optim, _ in OPTIMIZERS]
SGD = OPTIMIZERS[0]
slow = pytest.mark.slow
# Shared memory needs two ranks.
RUNS = [("c10d", 1), ("shm", 2), ("c10d", 2), ("shm", 4)]
LONG_RUNS = [pytest.param(*run, marks=slow) for run in (("shm", 3), ("c10d", 3), ("c10d", 4))]


@pytest.mark.rest_is_thorough(
    "SGD-c10d-1", "Adam-shm-2", "AdamW-c10d-2", "Adafactor-shm-4", "Adagrad-shm-3", "Adam-c10d-3"
)
@pytest.mark.parametrize(("transport", "world_size"), RUNS + LONG_RUNS)
@pytest.mark.parametrize(("optim", "options"), OPTIMIZERS, ids=IDS)
@on_ranks()
def test_fifty_steps(optim, options, world_size, transport):
    pair = make_pair(optim, options, transport=transport)
    for step in range(50):
        pair.backward(step)
        pair.assert_sharded()
        pair.step()
    pair.assert_equal()


@on_ranks(3)
def test_parameters_that_are_sent_in_half_precision():
    pair = make_pair(torch.optim.SGD, {"lr": 0.1}, oss_options={"broadcast_fp16": True})
    pair.train_alike(range(10), rtol=0.02, atol=5e-3)
    values = torch.cat([p.detach().flatten() for p in pair.model.parameters() if p.dtype == torch.float32])
    assert torch.equal(values, values.half().float()) and same_on_all_ranks([values])


@on_ranks(2)
def test_parameters_keep_their_strides():
    for transport in each(["shm", "c10d"]):
        module = nn.Sequential(nn.Conv3d(3, 4, 2), nn.Flatten(), nn.Linear(4, 5))
        module.to(memory_format=torch.channels_last_3d)
        module[2].weight.data = module[2].weight.data.t().contiguous().t()
        strides = [p.stride() for p in module.parameters()]
        plain = torchddp.DDP(copy.deepcopy(module), transport=transport)
        optimizer = OSS(module.parameters(), optim=torch.optim.SGD, lr=0.1)
        model = ShardedDataParallel(module, optimizer, transport=transport)
        for each_model, step in ((plain, torch.optim.SGD(plain.parameters(), lr=0.1).step), (model, optimizer.step)):
            each_model(torch.ones(2, 3, 2, 2, 2)).sum().backward()
            step()
        assert strides == [p.stride() for p in model.parameters()]
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


@on_ranks(2)
def test_reads_wait_for_parameters_in_flight():
    for transport, overlap in each(["shm", "c10d"], [True, False]):
        pair = make_pair(transport=transport, overlap_gather=overlap)
        module, other = pair.model.module, pair.reference.module
        for step in range(10):
            pair.train(range(step, step + 1))
            # Read through the module in all possible ways, right after the step.
            assert torch.equal(module.middle.weight, other.middle.weight)
            theirs = pair.reference.state_dict()
            for (key, value), (name, want) in zip(pair.model.state_dict().items(), theirs.items(), strict=True):
                assert key == name and torch.equal(value, want)
            assert torch.equal(module.wide(torch.ones(5).double()), other.wide(torch.ones(5).double()))
            pair.assert_equal()


@on_ranks(2)
def test_reads_while_a_peer_has_not_stepped(rank):
    store = dist.distributed_c10d._get_default_store()
    for case in each(["a forked child", "threads", "a signal handler that reads", "one that raises"]):
        pair = make_pair(transport="c10d")
        pair.backward(0)
        if rank == 1:
            store.wait([case])
        pair.step()
        want = list(pair.reference.module.parameters())

        def is_current(module=pair.model.module, want=want):
            return all(map(torch.equal, module.parameters(), want))

        def on_alarm(*_, case=case, is_current=is_current):
            store.set(case, "")
            if case == "one that raises":
                raise KeyboardInterrupt
            assert is_current()

        def read_in_child(is_current=is_current):
            with pytest.raises(RuntimeError, match="forked while updated parameters were on their way"):
                is_current()

        if rank == 0 and case == "a forked child":
            assert in_child(read_in_child)
            store.set(case, "")
        elif rank == 0 and case == "threads":
            with ThreadPoolExecutor(2) as threads:
                found = [threads.submit(is_current) for _ in range(2)]
                time.sleep(0.2)
                store.set(case, "")
                assert all(one.result() for one in found)
        elif rank == 0:
            signal.signal(signal.SIGALRM, on_alarm)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            if case == "one that raises":
                with pytest.raises(KeyboardInterrupt):
                    is_current()
                with pytest.raises(torchddp.TransportError, match="a signal handler raised an exception"):
                    is_current()
        assert case == "one that raises" or is_current()
    stay(rank)


@on_ranks(2)
def test_two_backwards_of_one_forward_and_none(rank):
    sharded = make_pair(make=small_net).model
    loss = loss_of(sharded(batch_of(rank, 0)))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Call zero_grad.* or a second backward"):
        loss.backward()

    # After a forward without one, the next backward is reduced as with torch's class, although it is under no_sync().
    sharded = make_pair(make=small_net).model
    sharded(batch_of(rank, 0))
    with sharded.no_sync():
        loss_of(sharded(batch_of(rank, 1))).backward()
        with pytest.raises(RuntimeError, match=r"a forward without a backward needs torch.no_grad\(\)"):
            loss_of(sharded(batch_of(rank, 2))).backward()


sgd = partial(OSS, optim=torch.optim.SGD, lr=0.1)
FOREIGN = "optimizer 0 holds parameters that are not the module's: parameter 0 of group 0"
SPARSE = "'0.weight' has sparse gradients, which can't be reduced to one rank. Create its embedding with sparse=False"
SIZE = "reduce_buffer_size must be a number of elements"


@on_ranks(2)
def test_models_that_can_not_be_wrapped(rank):
    net, wrapped = small_net(), small_net()
    foreign_on_1 = sgd((small_net() if rank == 1 else net).parameters())
    elsewhere = RuntimeError, f"ShardedDataParallel failed on other ranks: rank 1: ValueError: {FOREIGN}"
    all_of, taken = sgd(net.parameters()), sgd(wrapped.parameters())
    model = ShardedDataParallel(wrapped, taken)
    twice, some = [all_of, sgd(net.last.parameters())], sgd(net.first.parameters())
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    words = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    assert_each_raises(
        (lambda: ShardedDataParallel(net, sgd(small_net().parameters())), ValueError, FOREIGN),
        (lambda: ShardedDataParallel(net, foreign_on_1), *((ValueError, FOREIGN) if rank == 1 else elsewhere)),
        (lambda: ShardedDataParallel(net, twice), ValueError, "'last.weight' is in optimizers 0 and 1"),
        (lambda: ShardedDataParallel(net, some), ValueError, "trainable parameters are in no optimizer: 'norm.weight'"),
        (lambda: ShardedDataParallel(net, plain), TypeError, "torchddp.optim.OSS, got SGD"),
        (lambda: ShardedDataParallel(net, all_of, reduce_buffer_size=-1), ValueError, SIZE),
        (lambda: ShardedDataParallel(net, all_of, reduce_buffer_size=1.5), ValueError, SIZE),
        (lambda: ShardedDataParallel(net, all_of, reduce_buffer_size=True), ValueError, SIZE),
        (lambda: ShardedDataParallel(wrapped, taken), ValueError, "already belongs to another ShardedDataParallel"),
        (lambda: ShardedDataParallel(words, sgd(words.parameters())), RuntimeError, SPARSE),
        (lambda: taken.add_param_group({"params": [nn.Parameter(torch.ones(3))]}), ValueError, "1 of 1 new parameters"),
        # Modes that reduce to all ranks.
        (lambda: model.register_comm_hook(None, None), RuntimeError, "communication hook"),
        (lambda: model.update_process_group(None), RuntimeError, "share of the optimizer's state"),
        (model.replan, RuntimeError, "plan"),
        (lambda: copy.deepcopy(model), TypeError, "copied or pickled"),
    )
    with pytest.raises(ValueError, match="wrap once"), pytest.warns(UserWarning, match="already wrapped"):
        ShardedDataParallel(torchddp.DistributedDataParallel(net), all_of)
    assert torch.equal(copy.deepcopy(model.module).first.weight, model.module.first.weight)


@over_both
@pytest.mark.parametrize("where", ["backward", "step"])
@on_ranks(2, needed_ranks=[0])
def test_a_peer_that_dies(rank, where, transport):
    pair = make_pair(transport=transport)
    pair.train(range(2))
    if where == "backward" and rank == 1:
        os._exit(3)
    with pytest.raises(torchddp.TransportError, match="parameters" if where == "step" else ""):
        loss_of(pair.model(batch_of(rank, 2))).backward()
        if rank == 1:
            os._exit(3)
        assert where == "step"
        pair.oss.step()
        pair.model.synchronize()


M_MMAP_THRESHOLD = -3  # glibc's constant for mallopt
MIB = 2**20
RANKS, LAYERS, WIDTH = 4, 12, 768  # three layers of 2.25 MiB for each rank
# A bucket through gloo, which is also what is kept over shared memory for other ranks' gradients; a segment's header.
MORE_MIB = 8 + 1


def _resident():
    """This process's anonymous memory, and its part of the shared. (A part of what it has from its parent would change
    with the number of processes that have it, too.)
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory counts as long as it is resident
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (shared,) = [1024 * int(line.split()[1]) for line in lines if line.startswith("Pss_Shmem:")]
    return status_bytes("RssAnon") + shared


def _in_excess_of_the_model(rank, transport):
    """Resident bytes between backward and update, and the peak of the step.

    In that step the last rank is late, so the others hold all of their gradients until it comes.
    """
    # Large blocks are mapped from and returned to the system, so that resident memory follows them.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB // 2)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    x = torch.randn(2, WIDTH, requires_grad=True)
    gc.collect()
    resident, peak = _resident(), status_bytes("RssAnon") + status_bytes("RssShmem")
    optimizer = OSS(net.parameters(), torch.optim.AdamW, lr=0.01)
    model = ShardedDataParallel(net, optimizer, transport=transport)
    store = dist.distributed_c10d._get_default_store()
    for step in range(3):
        if step == 2:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
            x.register_hook(lambda _: store.set(f"ahead/{rank}", ""))  # the last gradient
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if step == 2 and rank == RANKS - 1:
            store.wait([f"ahead/{other}" for other in range(RANKS - 1)])
        loss.backward()
        if step == 2:
            dist.barrier()  # a page counts in part for each process that has mapped it
            resident = _resident() - resident
            dist.barrier()
        optimizer.step()
    peak = status_bytes("VmHWM") - status_bytes("RssFile") - peak
    assert model.reducer.transport.name == transport
    return resident, peak


@pytest.mark.usefixtures("cheap_messages")
def test_shared_memory_takes_no_more_than_the_process_group():
    most = {}
    for transport in ("c10d", "shm"):
        ranks = run_ranks(_in_excess_of_the_model, RANKS, transport)
        most[transport] = [max(of_rank) / MIB for of_rank in zip(*ranks, strict=True)]
    print("MiB of the rank with most, between backward and update, and at the peak:", most)
    for mine, theirs in zip(most["shm"], most["c10d"], strict=True):
        assert mine <= theirs + MORE_MIB, most
