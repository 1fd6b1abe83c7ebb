"""A regression test for each known bug of torch DDP and similar libraries that concerns DDP itself."""

import contextlib
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

from tests.harness import each, gathered, is_own_class, on_ranks, over_both
from tests.models import Mlp, TwoHeads, assert_steps, batch, loss_of, seeded, step_on
from torchddp import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[2]
MIB = 1024 * 1024


@pytest.mark.beyond_torch("waits for parameters that only the first step's sink leads to")
@on_ranks(2)
def test_static_graph_with_an_output_not_in_the_loss(rank, ddp_class):
    """torch reduced nothing after the first step."""
    for used in each([1, 2]):
        ddp = ddp_class(seeded(TwoHeads), static_graph=True, bucket_cap_mb=0.0001)

        def run(model, rank, step, used=used):
            torch.cat(model(batch(rank, step, 3, 4))[:used]).square().sum().backward()

        assert_steps(ddp, rank, range(4), run)


class Recomputed(Mlp):
    def forward(self, x):
        first = checkpoint(self.first, x, use_reentrant=True)
        self.hidden = checkpoint(lambda y: self.last(torch.tanh(self.middle(y))), first, use_reentrant=True)
        return torch.tanh(self.hidden)


@pytest.mark.beyond_torch("takes the backward of autograd.grad() for the step's own")
@on_ranks(2)
def test_static_graph_with_a_gradient_penalty(rank, ddp_class):
    """torch reduced nothing from the first step on."""
    ddp = ddp_class(seeded(Mlp), static_graph=True, bucket_cap_mb=0.0001)

    def run(model, rank, step):
        loss = loss_of(model(batch(rank, step)))
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + loss_of(grads)).backward()

    assert_steps(ddp, rank, range(3), run)

    def penalize(model, rank, step):  # the loss does not lead through the module's output
        inputs = batch(rank, step).requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        loss_of([slope]).backward()

    def balance(model, rank, step):  # the backwards of checkpoints, in which all hooks fire, end before the step's
        loss = loss_of(model(batch(rank, step).requires_grad_()))
        torch.autograd.grad(loss, vars(getattr(model, "module", model)).pop("hidden"), retain_graph=True)
        loss.backward()

    for net, wanted in ((Mlp, penalize), (Recomputed, balance)):
        assert_steps(ddp_class(seeded(net), static_graph=True, bucket_cap_mb=0.0001), rank, range(3), wanted)


@pytest.mark.beyond_torch("records nothing any more")
@on_ranks(2)
def test_static_graph_whose_first_backward_fails(rank, ddp_class):
    """torch reduced nothing from then on."""

    def fail(grad):
        raise MemoryError

    ddp = ddp_class(seeded(Mlp), static_graph=True)
    hook = ddp.module.last.register_forward_hook(lambda layer, x, output: output.register_hook(fail) and None)
    with pytest.raises(MemoryError):
        step_on(ddp, rank)
    hook.remove()
    assert_steps(ddp, rank, range(3))


def _evaluation_with_gradients(ddp, rank):
    ddp.eval()
    ddp(batch(rank, 0))
    ddp.train()
    step_on(ddp, rank)


@on_ranks(2)
def test_no_error_in_correct_programs(rank, ddp_class):
    """torch raised 'Expected to have finished reduction' (pytorch 43259)."""
    events = (lambda ddp, rank: [ddp(batch(rank, step)) for step in (0, 1)], _evaluation_with_gradients)
    for event, options, steps_before in each(events, ({}, {"find_unused_parameters": True}), (0, 1, 3)):
        ddp = ddp_class(seeded(Mlp), **options)
        for step in range(steps_before):
            step_on(ddp, rank, step)
        event(ddp, rank)
        assert_steps(ddp, rank, (7, 8))


@pytest.mark.beyond_torch("blames unused parameters only")
@on_ranks(2)
def test_exception_in_backward_is_raised_unchanged(rank, ddp_class):
    """Backward raises the user's error, the next forward reports the interrupted backward, and a new wrapper works."""

    def fail(grad):
        raise ZeroDivisionError("the user's own")

    for steps_before in each((0, 2)):
        ddp = ddp_class(seeded(Mlp), bucket_cap_mb=0.001)
        for step in range(steps_before):
            step_on(ddp, rank, step)
        hook = ddp.module.first.register_forward_hook(lambda layer, x, output: output.register_hook(fail) and None)
        with pytest.raises(ZeroDivisionError, match="the user's own"):
            step_on(ddp, rank, 5)
        hook.remove()
        with pytest.raises(RuntimeError, match="backward ended with an exception"):
            ddp(batch(rank, 6))
        assert_steps(ddp_class(seeded(Mlp)), rank, (7, 8))


class InOrder(nn.ModuleList):
    """Layers used in a given order."""

    def forward(self, x, order):
        for index in order:
            x = torch.tanh(self[index](x))
        return x


def layers(count):
    return seeded(lambda: InOrder(nn.Linear(8, 8, dtype=torch.float64) for _ in range(count)))


@pytest.mark.beyond_torch("never rebuilds buckets with find_unused_parameters")
@on_ranks(2)
def test_buckets_are_rebuilt_with_find_unused_parameters(rank, ddp_class):
    orders = []

    def note(state, bucket):
        orders[-1] += [names[id(p)] for p in bucket.parameters()]
        return default_hooks.allreduce_hook(None, bucket)

    ddp = ddp_class(layers(3), find_unused_parameters=True, bucket_cap_mb=0.0001)
    names = {id(p): name for name, p in ddp.module.named_parameters()}
    ddp.register_comm_hook(None, note)
    for step in range(3):
        orders.append([])
        ddp(batch(rank, step), (2, 1, 0)).square().sum().backward()
    assert gathered(orders) == [orders] * 2
    assert orders[0][0].startswith("2"), "at first the reverse of registration order"
    assert orders[2][0].startswith("0"), f"ready order after a step, got {orders[2]}"


@on_ranks(3)
def test_ranks_with_different_ready_orders_agree_on_a_rebuild(rank, ddp_class):
    """Ranks may use layers in different orders, but must send the same buckets."""

    def run(model, rank, step):
        model(batch(rank, step), ((0, 1, 2, 3) if rank % 2 else (0, 2, 1, 3))).square().sum().backward()

    assert_steps(ddp_class(layers(4), bucket_cap_mb=0.0001), rank, range(4), run)


@on_ranks(2)
def test_bucket_cap_means_what_is_documented(rank, ddp_class):
    """An explicit cap differs from the default, even with the default's value.

    For 12 layers of 1/4 MiB, in the third step, because torch sends a single bucket in the first.
    """
    sizes = []

    def note(state, bucket):
        sizes.append(bucket.buffer().nbytes)
        return default_hooks.allreduce_hook(None, bucket)

    for options, wanted in (
        ({}, [1 * MIB, 2 * MIB]),  # a first bucket of 1 MiB
        ({"bucket_cap_mb": 25}, [3 * MIB]),  # an explicit cap also applies to the first bucket
        ({"bucket_cap_mb": 2}, [2 * MIB, 1 * MIB]),
    ):
        if is_own_class():
            options["transport"] = "c10d"  # over shared memory the default is 1 MiB for all buckets
        ddp = ddp_class(nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12))), **options)
        ddp.register_comm_hook(None, note)
        for _ in range(3):
            sizes.clear()
            ddp(torch.ones(1, 256)).sum().backward()
        assert sizes == wanted, options


@pytest.mark.beyond_torch("says nothing")
@on_ranks(2)
def test_create_graph_warns_that_higher_orders_are_not_synchronized(rank, ddp_class):
    """torch gave no warning (pytorch 63812)."""
    for create_graph in each((True, False)):
        ddp = ddp_class(seeded(Mlp))

        def run(model, rank, step, create_graph=create_graph):
            loss_of(model(batch(rank, step))).backward(create_graph=create_graph)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert_steps(ddp, rank, [0], run)
        texts = [str(w.message) for w in caught if "create_graph" in str(w.message)]
        assert any("synchroni" in text for text in texts) == bool(texts) == create_graph, texts


@on_ranks(2)
def test_fused_optimizer_with_no_sync(rank, ddp_class):
    """torch's optimizer overlap lacked no_sync and accumulation (pytorch 71595)."""
    ddp, plain = (ddp_class(seeded(Mlp)) for _ in range(2))
    ddp._register_fused_optim(torch.optim.SGD, 0.01)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for step in range(0, 6, 2):
        for model in (ddp, plain):
            model.zero_grad()
            with model.no_sync():
                step_on(model, rank, step)
        assert all(map(torch.equal, plain.parameters(), ddp.parameters())), "the optimizer stepped under no_sync"
        for model in (ddp, plain):
            step_on(model, rank, step + 1)
        optimizer.step()
    torch.testing.assert_close(dict(ddp.named_parameters()), dict(plain.named_parameters()))


EXIT_SCRIPT = """
import os, sys, tempfile
import torch, torch._dynamo
import torch.distributed as dist
from tests.harness import class_under_test

for destroys in (True, False, True):
    path = tempfile.mktemp()
    children = []
    for rank in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
            model = class_under_test()(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
            for _ in range(4):
                model.zero_grad()
                model(torch.randn(5, 4)).sum().backward()
            if destroys:
                dist.destroy_process_group()
            sys.exit(0)  # with the model
    print("exit", *(os.waitpid(pid, 0)[1] for pid in children), flush=True)
"""


@pytest.mark.slow
def test_clean_exit_at_interpreter_end():
    """No 'terminate called without an active exception' at exit, with or without destroy_process_group."""
    run = subprocess.run([sys.executable, "-c", EXIT_SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout) == (0, "exit 0 0\n" * 3), run.stdout + run.stderr
    assert "terminate called" not in run.stderr and "Fatal" not in run.stderr, run.stderr


@pytest.mark.beyond_torch("may wait for ever: its Reducer drops the last reference to the group with the GIL held")
@on_ranks(2)
def test_model_may_outlive_its_process_group(rank, ddp_class):
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    for number in range(25):
        dist.init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=2)
        ddp = ddp_class(seeded(Mlp))
        step_on(ddp, rank)
        dist.barrier()
        dist.destroy_process_group()
        del ddp


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True, dtype=torch.float64)
        self.head = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(rows))


class AddedLookup(Lookup):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(torch.ones(len(rows), 4, dtype=torch.float64)) + self.table(rows))


@pytest.mark.beyond_torch("scaled the sparse gradient in memory that it shared with its output's gradient")
@over_both
@on_ranks(2)
def test_a_sparse_gradient_that_shares_memory_with_other_gradients(rank, transport):
    """Those of what is added to an embedding were divided by the world size twice."""
    rows = torch.tensor([rank, 3, 4, 8])
    for search in each([False, True]):
        plain = seeded(AddedLookup)
        model = DistributedDataParallel(seeded(AddedLookup), find_unused_parameters=search, transport=transport)
        for _ in range(2):
            plain.zero_grad()
            model.zero_grad()
            loss_of(plain(rows)).backward()
            loss_of(model(rows)).backward()
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                wanted = sum(gathered(p.grad.to_dense())) / 2
                torch.testing.assert_close(q.grad.to_dense(), wanted)


@on_ranks(2)
def test_sparse_gradients_that_are_not_rows(rank):
    """Accepted as in torch if all ranks use the parameter; otherwise refused, because gloo would abort."""
    for search in each([False, True]):
        model = DistributedDataParallel(seeded(Lookup), find_unused_parameters=search, transport="c10d")
        table = model.module.table.weight
        table.register_hook(lambda grad: grad.to_dense().to_sparse(2))
        words = r"'table.weight' on rank \d: its sparse gradient has sparse_dim 2"
        with pytest.raises(RuntimeError, match=words) if search else contextlib.nullcontext():
            loss_of(model(torch.tensor([rank, 3, 3, 8]))).backward()
        assert search or table.grad.sparse_dim() == 2
