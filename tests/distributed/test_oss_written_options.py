"""Optimizers that write options into their own groups, and that have train() and eval(), under OSS."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

import torchddp
from tests.harness import gathered, on_ranks
from tests.models import batch, loss_of, seeded
from tests.oss import float_mlp, twins
from torchddp.optim import OSS


class ScheduleFree(torch.optim.SGD):
    """Steps z, and shows an average of z (Defazio et al. 2024). Like their code, it skips groups that are empty on
    this rank.
    """

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            active = [p for p in group["params"] if p.grad is not None]
            if not active:
                continue
            group["k"] = group.get("k", 0) + 1
            group["weight_sum"] = group.get("weight_sum", 0.0) + group["lr"] ** 2
            group["train_mode"] = True
            for p in active:
                state = self.state[p]
                z = state.setdefault("z", p.clone())
                z.sub_(p.grad, alpha=group["lr"])
                p.lerp_(z, 1 / group["k"])

    @torch.no_grad()
    def _swap(self, towards, weight):
        for group in self.param_groups:
            if group.get("train_mode", towards) != towards:
                for p in group["params"]:
                    p.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = towards

    def eval(self):
        self._swap(False, 1 - 1 / 0.9)

    def train(self):
        self._swap(True, 1 - 0.9)


class Finding(torch.optim.SGD):
    """Finds its learning rate from all gradients together, as Prodigy does."""

    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["d"] = sum(float(p.grad.norm()) for p in self.param_groups[0]["params"])


def two_groups(model):
    first, *rest = model.parameters()
    return [{"params": [first]}, {"params": rest, "lr": 0.05}]


@on_ranks(2, 3)
def test_ranks_keep_what_one_process_would_have_written(rank, world_size):
    """A group of one parameter is empty on all ranks but one."""
    pair = twins(ScheduleFree, {"lr": 0.1}, two_groups)
    for switch in ("train", "eval", "train"):
        pair.train(range(3), same_batch=True)
        for optimizer in (pair.oss, pair.plain):
            getattr(optimizer, switch)()
        pair.assert_equal()
        told = [{k: v for k, v in g.items() if k != "params"} for g in pair.oss.param_groups]
        assert told == [{k: v for k, v in g.items() if k != "params"} for g in pair.plain.param_groups]
        assert all(theirs == told for theirs in gathered(told))
    pair.oss.consolidate_state_dict()
    if rank == 0:
        assert [group["k"] for group in pair.oss.state_dict()["param_groups"]] == [9, 9]


@on_ranks(2)
def test_train_and_eval_reach_sharded_parameters(rank):
    module = seeded(float_mlp)
    oss = OSS(module.parameters(), ScheduleFree, lr=0.1)
    model = torchddp.ShardedDataParallel(module, oss)
    for step in range(2):
        oss.zero_grad()
        loss_of(model(batch(rank, step, dtype=torch.float32))).backward()
        oss.step()
    before = [p.clone() for p in module.parameters()]
    oss.eval()
    now = [p.detach().clone() for p in module.parameters()]
    assert not any(map(torch.equal, before, now))
    for theirs in gathered(now):
        assert all(map(torch.equal, theirs, now))
    assert not hasattr(OSS(seeded(float_mlp).parameters(), torch.optim.SGD, lr=0.1), "eval")


@on_ranks(2, 3)
def test_a_value_of_a_ranks_own_parameters_is_an_error_on_all(rank, world_size):
    pair = twins(Finding, {"lr": 0.1})
    with pytest.raises(RuntimeError, match=r"different values of 'd' into group 0 \(.* on rank 0, .* on rank 1"):
        pair.train(range(2))


@on_ranks(2)
def test_torchs_post_local_sgd_is_refused(rank):
    model = seeded(float_mlp)
    optimizer = PostLocalSGDOptimizer(
        OSS(model.parameters(), lr=0.1), PeriodicModelAverager(2, process_group=dist.group.WORLD)
    )
    loss_of(model(batch(rank, 0, dtype=torch.float32))).backward()
    with pytest.raises(ValueError, match="PostLocalSGDOptimizer can't wrap OSS, whose steps are collective"):
        optimizer.step()
