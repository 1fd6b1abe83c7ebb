"""The state of torchddp.optim.OSS: saved, loaded, moved, written by optimizers themselves; frozen parameters."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.optim import PostLocalSGDOptimizer

import torchddp
from tests.harness import assert_each_raises, each, gathered, on_ranks, run_ranks
from tests.models import batch, loss_of, seeded
from tests.oss import assert_same_state, float_mlp, twins, two_groups, whole_state
from torchddp.optim import OSS, load_checkpoint


class Preconditioned(torch.optim.Optimizer):
    """An optimizer with square matrices, a list, a count in the group, and state without a parameter."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        self.state["seen"] = {"steps": torch.tensor(self.param_groups[0]["steps"])}
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                state = self.state[param]
                grad = param.grad.reshape(param.shape[0], -1)
                state.setdefault("matrix", torch.eye(param.shape[0])).add_(grad @ grad.t())
                state.setdefault("history", []).append(grad.norm())
                param -= group["lr"] * torch.linalg.solve(state["matrix"], grad).view_as(param)


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adafactor, {}),
]
ALL = [*OPTIMIZERS, (Preconditioned, {})]


def trained_on_two(optim, options, path):
    """Train ten steps on two ranks; save the model and the whole state, which equals the plain optimizer's."""

    def work(rank):
        pair = twins(optim, options, two_groups)
        pair.train(range(10), same_batch=True)
        pair.oss.consolidate_state_dict(1)
        if rank == 1:
            whole = pair.oss.state_dict()
            assert_same_state(whole, pair.plain.state_dict())
            assert list(whole["state"])[:5] == [0, 1, 2, 3, 4]
            torch.save({"model": pair.model.module.state_dict(), "optim": whole}, path)
        dcp.save({"optim": pair.oss.local_state_dict()}, checkpoint_id=f"{path}.dcp")

    run_ranks(work, 2)


@pytest.mark.rest_is_thorough("AdamW", "Preconditioned")
@pytest.mark.parametrize(("optim", "options"), ALL, ids=[optim.__name__ for optim, _ in ALL])
def test_resuming_on_any_world_size_equals_an_uninterrupted_run(optim, options, tmp_path):
    path = tmp_path / "state.pt"
    trained_on_two(optim, options, path)

    def work(rank):
        for way in each(["whole", "checkpoint"]):
            saved = torch.load(path)
            pair = twins(optim, options, two_groups)
            pair.model.module.load_state_dict(saved["model"])
            if way == "whole":
                pair.oss.load_state_dict(saved["optim"])
            else:
                load_checkpoint(pair.oss, checkpoint_id=f"{path}.dcp")
            part = pair.oss.local_state_dict()
            assert sorted(sum(gathered(part["sharded_params"]), [])) == [0, 1, 2, 3, 4], way
            state, kept = saved["optim"]["state"], (*part["sharded_params"], "seen")
            assert_same_state(part["state"], {key: entry for key, entry in state.items() if key in kept})
            assert_same_state(part["param_groups"], saved["optim"]["param_groups"])
            # The other twin trains without interruption.
            for step in range(20):
                pair.backward(step, same_batch=True)
                if step >= 10:
                    pair.oss.step()
                pair.plain.step()
            pair.assert_equal()

    for world_size in (1, 3):
        run_ranks(work, world_size)


@on_ranks(2)
def test_state_moves_between_oss_and_the_plain_optimizer(rank):
    # Both ways between OSS and the plain optimizer.
    for optim, options in each(ALL):
        pair = twins(optim, options, two_groups)
        pair.train(range(5))
        whole = whole_state(pair.oss)
        pair.oss.load_state_dict(copy.deepcopy(pair.plain.state_dict()))
        pair.plain.load_state_dict(whole)
        pair.train_alike(range(5, 10))

    # With a tensor as learning rate, and in another dtype.
    pair = twins(torch.optim.Adam, {"lr": torch.tensor(0.01)})
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (pair.oss, pair.plain)]
    for step in range(3):
        pair.train(range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()
    saved = copy.deepcopy(pair.plain.state_dict())
    for entry in saved["state"].values():
        entry["exp_avg"] = entry["exp_avg"].double()
    pair.oss.load_state_dict(saved)
    assert {entry["exp_avg"].dtype for entry in pair.oss.state.values()} == {torch.float32}
    pair.train_alike(range(3, 5))
    assert gathered(pair.oss.param_groups[0]["lr"].item()) == [pytest.approx(0.01 / 8)] * 2


@on_ranks(3)
def test_state_is_consolidated_on_one_rank_and_goes_stale(rank):
    pair = twins()
    with pytest.raises(
        RuntimeError, match=rf"rank {rank} has no consolidated state: call .* on its recipient_rank \(0"
    ):
        pair.oss.state_dict()
    pair.train(range(2))
    for recipient in (0, 2):
        pair.oss.consolidate_state_dict(recipient)
        if rank != recipient:
            with pytest.raises(RuntimeError, match="has no consolidated state"):
                pair.oss.state_dict()
            continue
        pair.oss.param_groups[0]["lr"] = pair.plain.param_groups[0]["lr"] = 0.5  # the state has the current value
        whole = pair.oss.state_dict()
        assert_same_state(whole, pair.plain.state_dict())
        live = pair.oss.state.values()
        held = {value.data_ptr() for entry in whole["state"].values() for value in entry.values()}
        assert not held & {value.data_ptr() for entry in live for value in entry.values()}
    pair.train(range(2, 3))
    with pytest.raises(RuntimeError, match="has no consolidated state"):
        pair.oss.state_dict()
    with pytest.raises(ValueError, match="recipient_rank must be a rank of the group"):
        pair.oss.consolidate_state_dict(3)


@on_ranks(2)
def test_loading_the_state_of_another_model_or_rank_changes_nothing(rank):
    pair = twins(groups=two_groups)
    pair.train(range(2))
    good = pair.plain.state_dict()
    before = copy.deepcopy(pair.oss.local_state_dict())
    parts = gathered(before)
    assert_same_state({index: entry for part in parts for index, entry in part["state"].items()}, good["state"])
    groups = good["param_groups"]
    wrong_shape = copy.deepcopy(good)
    wrong_shape["state"][4]["exp_avg"] = torch.zeros(3, 3)
    short = [groups[0], {**groups[1], "params": [2, 3]}]
    cases = (
        ({"param_groups": groups}, "it has no 'state'"),
        ({**good, "param_groups": groups[:1]}, "it has 1 parameter groups, the optimizer 2"),
        ({**good, "param_groups": short}, "parameter group 1 has 2 parameters, the optimizer's 3"),
        (wrong_shape, "'exp_avg' for parameter 2 of group 1 has shape [3, 3]"),
        ({**good, "state": {0: 5}}, "entry for parameter 0 of group 0 is a int"),
    )
    fresh = twins(groups=two_groups).oss
    for oss in (pair.oss, fresh):
        assert_each_raises(*((partial(oss.load_state_dict, state), ValueError, words) for state, words in cases))
    assert_same_state(before, pair.oss.local_state_dict())
    with pytest.raises(ValueError, match="another rank's part of the state: parameter . of group . is not in it"):
        fresh.load_state_dict(parts[1 - rank])
    assert not fresh.local_state_dict()["state"]
    fresh.load_state_dict(pickle.loads(pickle.dumps(before)))  # its own state
    assert_same_state(before, fresh.local_state_dict())


def test_parts_of_a_checkpoint(tmp_path, monkeypatch):
    """Each rank reads its own part; a part of another model is refused."""
    trained_on_two(torch.optim.SGD, {"momentum": 0.9}, tmp_path / "state")

    def work(rank):
        small = twins(torch.optim.SGD, {"momentum": 0.9}, two_groups, make=lambda: float_mlp(width=4)).oss
        path = tmp_path / "state.dcp"
        assert_each_raises(
            (lambda: load_checkpoint(small, checkpoint_id=path), ValueError, "parameter 0 of group 0 has sh"),
            (lambda: load_checkpoint(small, "x", checkpoint_id=path), ValueError, "no optimizer under"),
            (lambda: load_checkpoint(small), ValueError, "needs checkpoint_id"),
        )
        assert not small.local_state_dict()["state"]

        fresh = twins(torch.optim.SGD, {"momentum": 0.9}, two_groups).oss
        read = []
        load = state_dict_loader.load
        monkeypatch.setattr(state_dict_loader, "load", lambda values, **k: (read.extend(values), load(values, **k)))
        load_checkpoint(fresh, storage_reader=dcp.FileSystemReader(path))
        part = fresh.local_state_dict()["sharded_params"]
        assert [n for n in sorted(read) if ".state." in n] == [f"optim.state.{i}.momentum_buffer" for i in part]
        assert sorted(sum(gathered(part), [])) == [0, 1, 2, 3, 4]

    run_ranks(work, 3)


@on_ranks(2)
def test_a_checkpoint_that_one_rank_can_not_load_is_an_error_on_all(rank, tmp_path):
    """Nobody waits for that rank, and all can go on."""
    pair = twins(Preconditioned, {}, two_groups)
    pair.train(range(2), same_batch=True)
    path = tmp_path / "saved"
    dcp.save({"optim": pair.oss.local_state_dict()}, checkpoint_id=path)
    cases = [({"checkpoint_id": tmp_path / "elsewhere"}, OSError), ({"key": "x"}, ValueError), ({}, ValueError)]
    for given, error in cases:
        if rank == 1 and not given:  # the last one: its live state has another shape
            next(state for state in pair.oss.state.values() if "matrix" in state)["matrix"] = torch.eye(1)
        with pytest.raises(error if rank == 1 else RuntimeError) as caught:
            load_checkpoint(pair.oss, **{"checkpoint_id": path, **(given if rank == 1 else {})})
        assert rank == 1 or "load_checkpoint failed on other ranks: rank 1: " in str(caught.value), caught.value
    assert gathered(rank) == [0, 1]


@on_ranks(1)
def test_one_rank_needs_no_consolidation_and_has_hooks(rank):
    pair = twins()
    pair.train(range(2))
    assert_same_state(pair.oss.state_dict(), pair.plain.state_dict())
    oss = pair.oss
    oss.register_state_dict_post_hook(lambda optimizer, state: {**state, "epoch": 3})
    seen = []
    oss.register_load_state_dict_pre_hook(lambda optimizer, state: seen.append(state.pop("epoch")))
    oss.register_load_state_dict_post_hook(lambda optimizer: seen.append("loaded"))
    oss.load_state_dict(oss.state_dict())
    assert seen == [3, "loaded"]
    with pytest.raises(TypeError, match="can't be copied or pickled"):
        pickle.dumps(oss)


def train_by_hand(params, others, oss, plain, steps):
    """Train with averaged gradients but without a wrapper, which would check what is trainable."""
    for step in steps:
        for index, pair in enumerate(zip(params, others, strict=True)):
            for param in pair:
                generator = torch.Generator().manual_seed(100 * step + index)
                param.grad = torch.randn(param.shape, generator=generator) if param.requires_grad else None
        oss.step()
        plain.step()
        assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True)), step


@on_ranks(1, 3)
def test_parameters_frozen_and_thawed(rank):
    for optim, options in each(OPTIMIZERS):
        model, other = (seeded(lambda: nn.Sequential(*[nn.Linear(3, n) for n in (7, 2, 9, 4)])) for _ in range(2))

        def set_trainable(index, trainable, nets=(model, other)):
            for net in nets:
                net[index].requires_grad_(trainable)

        set_trainable(1, False)
        params, others = list(model.parameters()), list(other.parameters())
        oss, plain = OSS(params, optim, **options), optim(others, **options)
        assert not set(model[1].parameters()) & set(oss.param_to_rank)
        train_by_hand(params, others, oss, plain, range(3))
        first_owners = dict(oss.param_to_rank)
        set_trainable(1, True)
        set_trainable(2, False)
        params[2].grad = torch.ones_like(params[2])
        with pytest.raises(RuntimeError, match="parameter 2 of group 0 has a gradient.*refresh_trainable"):
            oss.step()
        oss.refresh_trainable()
        assert set(oss.param_to_rank) == set(params)
        assert all(oss.param_to_rank[p] == owner for p, owner in first_owners.items())
        train_by_hand(params, others, oss, plain, range(3, 6))
        whole = whole_state(oss)
        assert_same_state(whole, plain.state_dict())
        # Restart with the same layer frozen: its state is kept until it is thawed.
        oss = OSS(params, optim, **options)
        oss.load_state_dict(whole)
        train_by_hand(params, others, oss, plain, range(6, 8))
        set_trainable(2, True)
        oss.refresh_trainable()
        train_by_hand(params, others, oss, plain, range(8, 10))


@on_ranks(2)
def test_frozen_at_first_or_later(rank, monkeypatch):
    # A frozen parameter is not sent, and its leftover gradient is not applied.
    params = [nn.Parameter(torch.ones(n)) for n in (3, 2)]
    oss = OSS(params, torch.optim.SGD, lr=1.0)
    params[0].requires_grad_(False)
    oss.refresh_trainable()
    for param in params:
        param.grad = torch.ones_like(param)
    sent = []
    broadcast = dist.broadcast
    monkeypatch.setattr(dist, "broadcast", lambda t, **k: (sent.append(t.numel()), broadcast(t, **k))[1])
    oss.step()
    assert params[0].grad is not None
    assert gathered((params[0].tolist(), params[1].tolist(), sent)) == [([1.0] * 3, [0.0] * 2, [2 * 4])] * 2

    # An optimizer that creates state in its constructor also has it for parameters thawed or added later.
    params, others = ([nn.Parameter(torch.ones(n)) for n in (4, 3, 2)] for _ in range(2))
    params[1].requires_grad_(False)
    oss, plain = OSS(params[:2], torch.optim.Adagrad), torch.optim.Adagrad(others)
    assert_same_state(oss.local_state_dict()["state"], {0: plain.state[others[0]]} if rank == 0 else {})
    params[1].requires_grad_(True)
    oss.refresh_trainable()
    oss.add_param_group({"params": params[2]})
    train_by_hand(params, others, oss, plain, range(3))


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


@on_ranks(2, 3)
def test_ranks_keep_what_one_process_would_have_written(rank, world_size):
    """A group of one parameter is empty on all ranks but one."""

    def groups(model):
        first, *rest = model.parameters()
        return [{"params": [first]}, {"params": rest, "lr": 0.05}]

    pair = twins(ScheduleFree, {"lr": 0.1}, groups)
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

    # A value of a rank's own parameters is an error on all ranks.
    pair = twins(Finding, {"lr": 0.1})
    with pytest.raises(RuntimeError, match=r"different values of 'd' into group 0 \(.* on rank 0, .* on rank 1"):
        pair.train(range(2))


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


@on_ranks(2)
def test_torchs_post_local_sgd_is_refused(rank):
    model = seeded(float_mlp)
    optimizer = PostLocalSGDOptimizer(
        OSS(model.parameters(), lr=0.1), PeriodicModelAverager(2, process_group=dist.group.WORLD)
    )
    loss_of(model(batch(rank, 0, dtype=torch.float32))).backward()
    with pytest.raises(ValueError, match="PostLocalSGDOptimizer can't wrap OSS, whose steps are collective"):
        optimizer.step()
