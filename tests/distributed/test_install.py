"""torchddp.install() on several ranks: any code that wraps a model gets our class, with torch's weights.

Also the count of steps, which proves that our reducer ran, and announcements, which are logged once per job, whatever
launched its ranks, and only if they took effect.
"""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

import torchddp
from tests import framework
from tests.harness import each, gathered, logged, on_ranks, reductions, through_a_file
from tests.models import Mlp, seeded, step_on
from tests.programs import CLAIM, python


def net(dtype=torch.float64):
    return seeded(lambda: Mlp(dtype=dtype))


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


WAYS = {
    "attribute": lambda module: torch.nn.parallel.DistributedDataParallel(module),
    "other attribute": lambda module: torch.nn.parallel.distributed.DistributedDataParallel(module),
    "name": lambda module: framework.DDP(module),
    "default argument": lambda module: framework.wrap(module),
    "dict": lambda module: framework.CLASSES["ddp"](module),
    "partial": lambda module: framework.make(module),
    "torch's arguments": lambda module: framework.wrap(
        module, device_ids=None, bucket_cap_mb=25, gradient_as_bucket_view=False, check_reduction=True
    ),
}


@on_ranks(2)
def test_every_reference_to_the_class_makes_ours_with_torchs_weights(rank):
    expected = framework.train(TorchDDP(net()), rank)
    for name, wrap in each(WAYS.items()):
        with reductions(3), torchddp.install():
            model = wrap(net())
            assert type(model) is torchddp.DDP, name
            assert same(framework.train(model, rank), expected), name
        assert type(wrap(net())) is TorchDDP, name


@on_ranks(2)
def test_models_of_both_classes_continue_across_the_switch(rank):
    torchs = TorchDDP(net())
    first = framework.train(torchs, rank)
    with torchddp.install():
        assert isinstance(torchs, framework.DDP) and type(torchs) is TorchDDP
        ours = framework.wrap(net())
        for made in (copy.deepcopy(torchs), pickle.loads(pickle.dumps(torchs))):
            assert type(made) is TorchDDP  # a copy has the class of the original
        loaded = through_a_file(ours, weights_only=False)
    assert isinstance(ours, TorchDDP) and same(framework.train(ours, rank), first)
    assert type(loaded) is torchddp.DDP and same(framework.train(loaded, rank), first)


@on_ranks(2)
def test_defaults_reach_the_class_and_explicit_arguments_win(rank):
    with torchddp.install(transport="c10d", comm_hook="bf16"):
        for _ in range(2):  # each model has its own hook
            model = framework.wrap(net(torch.float32))
            assert model.session.options.transport == "c10d" and len(model._comm_hooks) == 1
        model = framework.wrap(net(), transport="shm", comm_hook=None)
        assert model.session.options.transport == "shm" and not model._comm_hooks

        class Derived(TorchDDP):
            pass

        assert Derived(net(torch.float32)).session.options.transport == "c10d"

    with torchddp.install(gradient_as_bucket_view=True, bucket_cap_mb=3, device_ids=None, dim=0):
        model, by_place = framework.wrap(net()), torch.nn.parallel.DistributedDataParallel(net(), None, None, 0)
        assert model.session.options.gradient_as_bucket_view and by_place.session.options.gradient_as_bucket_view
        assert model.bucket_bytes_cap == 3 * 2**20
        assert framework.wrap(net(), bucket_cap_mb=7).bucket_bytes_cap == 7 * 2**20
        assert not framework.wrap(net(), gradient_as_bucket_view=False).session.options.gradient_as_bucket_view


@on_ranks(2)
def test_classes_derived_from_torchs(rank):
    expected = framework.train(TorchDDP(net()), rank)
    with torchddp.install():

        class Meanwhile(TorchDDP):
            def __init__(self, module, answer):
                super().__init__(module)
                self.answer = answer

        class ByName(TorchDDP):
            def __init__(self, module):
                TorchDDP.__init__(self, module)

        with pytest.raises(TypeError, match=r"ByName was derived.*call super\(\).__init__"):
            ByName(net())
    model = Meanwhile(net(), 42)
    assert model.answer == 42 and isinstance(model, torchddp.DDP)
    with reductions(3):
        assert same(framework.train(model, rank), expected)


@on_ranks(2)
def test_torchs_own_uses_of_its_class(rank):
    def train_replicated():
        module = replicate(net())
        for _ in range(2):
            module(torch.full((3, 8), float(rank + 1), dtype=torch.float64)).sum().backward()
        return [parameter.grad.clone() for parameter in module.parameters()]

    expected = train_replicated()
    with reductions(2), torchddp.install():
        assert same(train_replicated(), expected)


@on_ranks(1, 2)
def test_each_synchronized_backward_of_ours_counts(rank):
    with reductions(3):
        ddp = torchddp.DDP(net())
        for step in range(3):
            step_on(ddp, rank, step)
        with ddp.no_sync():
            step_on(ddp, rank, 3)
        del ddp  # steps of freed models count too
        step_on(net(), rank)
        step_on(TorchDDP(net()), rank)


def count(messages, words=CLAIM):
    return sum(words in message for message in messages)


@on_ranks(1, 2, 4)
def test_announced_once_per_job_by_rank_0_of_the_first_model(rank, world_size):
    said = logged()
    torchddp.install()
    before = count(said)
    for _ in range(2):
        framework.wrap(net())
    assert gathered((before, count(said))) == [(0, int(rank == 0)) for rank in range(world_size)]
    earlier = "Classes derived from it before install() keep torch's reducer"
    assert count([line for line in said if "DerivedBefore" in line], earlier) == int(rank == 0)


@pytest.mark.parametrize("members", [[[0, 1], [2, 3]], [[1, 2]]], ids=["two groups", "rank 0 has no model"])
@on_ranks(4)
def test_models_of_some_ranks_are_announced_as_one_job(rank, members):
    said = logged()
    torchddp.install()
    for ranks in members:
        group = dist.new_group(ranks)
        if rank in ranks:
            framework.wrap(net(), process_group=group)
    counts = gathered(count(said))
    assert sum(counts) == 1 == sum(counts[ranks[0]] for ranks in members)


@on_ranks(2)
def test_a_derived_class_is_announced_with_its_first_model(rank):
    said = logged()
    with torchddp.install():

        class Derived(TorchDDP):
            pass

        before = len(said)
        for _ in range(2):
            Derived(net())
        framework.wrap(net())
    (before, messages), (_, others) = gathered((before, said))
    assert before == 0 and len(messages) == 1 and others == []
    assert f"{CLAIM}. The first model is a {__name__}." in messages[0]
    assert "Derived, which is derived from it" in messages[0]


@on_ranks(2)
def test_a_class_that_keeps_torchs_reducer_is_not_announced_but_explained(rank):
    said = logged()
    torchddp.install()
    for _ in range(2):
        assert not isinstance(framework.DerivedBefore(net()), torchddp.DDP)
    early = count(said, "tests.framework.DerivedBefore was derived from torch's DistributedDataParallel before")
    with pytest.raises(RuntimeError):  # nor is a model that could not be constructed
        framework.wrap(torch.nn.Identity())
    assert gathered((count(said), early)) == [(0, 1), (0, 0)]


@on_ranks(4)
def test_an_unavailable_transport_is_reported_once(rank, monkeypatch):
    monkeypatch.setenv("TORCHDDP_SHM_LIMIT_MB", "-1")
    said = logged()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    names = [torchddp.DDP(net(), process_group=group).reducer.transport.name for group in (None, pairs[rank // 2])]
    found = gathered((count(said, "transport 'shm' can't be used"), names))
    assert sum(count for count, _ in found) <= 2  # one for the world and one for a pair of ranks
    assert {name for _, names in found for name in names} == {"c10d"}


SPAWNED = """
import sys, torch, torch.distributed as dist, torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel as D
import torchddp

def work(rank, file):
    torchddp.install()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    sys.stdout.write(type(D(torch.nn.Linear(2, 2))).__module__ + "\\n")
    dist.destroy_process_group()

if __name__ == "__main__":
    torchddp.install()
    torch.multiprocessing.spawn(work, (sys.argv[1],), nprocs=2)
"""


@pytest.mark.slow
def test_once_under_spawn_from_a_parent_that_called_install(tmp_path):
    (tmp_path / "program.py").write_text(SPAWNED)
    done = python("program.py", str(tmp_path / "store"), cwd=tmp_path)
    assert done.stdout.split() == ["torchddp.ddp.module"] * 2, done.stdout + done.stderr
    assert done.returncode == 0 and done.stderr.count(CLAIM) == 1, done.stderr
