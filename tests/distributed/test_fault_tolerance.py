"""Models under a fake torchft manager; tests/fault/test_torchft.py uses the real one."""

import copy
import gc
import pickle
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchddp
from tests.harness import each, gathered, on_ranks
from tests.managers import FakeManager
from tests.models import Branches, assert_steps, batch, reordered, same_on_all_ranks, seeded
from tests.sharded import batch_of, loss_of, small_net
from torchddp import Checks, Precision, TransportError, notices
from torchddp.comm_hooks import BF16, PowerSGD
from torchddp.fault_tolerance.averager import PeriodicAverager
from torchddp.fault_tolerance.data_parallel import DistributedDataParallel, PureDistributedDataParallel
from torchddp.fault_tolerance.replica_state import bucket_names, check_buckets, load_state_dict, state_dict

SMALL = 0.001  # MiB: several buckets
net = partial(seeded, small_net, 3)
MODES = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


def under_manager(make=net, bucket_cap_mb=SMALL, **options):
    module, manager = make(), FakeManager()
    return module, manager, DistributedDataParallel(manager, module, bucket_cap_mb=bucket_cap_mb, **options)


def step_on(model, rank, step, set_to_none=True):
    model.zero_grad(set_to_none)
    loss_of(model(batch_of(rank, step))).backward()


def step_under(manager, model, rank, step, set_to_none=True):
    """Run a step; return whether to commit it."""
    manager.start_quorum()
    step_on(model, rank, step, set_to_none)
    return manager.should_commit()


def assert_averages(module, step, microbatches=1, ranks=None):
    """Assert averages over these ranks' batches (by default all), computed locally."""
    reference = copy.deepcopy(module)
    reference.zero_grad(set_to_none=True)
    ranks = ranks or range(dist.get_world_size())
    for other in ranks:
        for part in range(microbatches):
            (loss_of(reference(batch_of(other, step + 1000 * part))) / len(ranks)).backward()
    for (name, mine), wanted in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-5, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}")


@on_ranks(1, 3)
def test_gradients_are_averages_over_participants(rank):
    for options in (*MODES, {"gradient_as_bucket_view": False}):
        module, manager, model = under_manager(**options)
        assert isinstance(model, torchddp.DistributedDataParallel)
        buckets = len(model.reducer.plan)
        assert buckets > 2
        for step in range(4):
            assert step_under(manager, model, rank, step, set_to_none=step % 2 == 0)
            assert_averages(module, step)
            assert sum(floating for _, floating in manager.calls) == buckets

        manager.start_quorum()
        model.zero_grad()
        with model.no_sync():
            loss_of(model(batch_of(rank, 7))).backward()
        assert manager.calls == []
        loss_of(model(batch_of(rank, 1007))).backward()
        assert_averages(module, 7, microbatches=2)
        assert model._get_ddp_logging_data()["backend_name"] == "torchft"


@on_ranks(2)
def test_buckets_are_never_rebuilt_and_start_during_backward(rank):
    for options in MODES:
        _, manager, model = under_manager(lambda: reordered(net()), **options)
        ordinary = torchddp.DistributedDataParallel(reordered(net()), bucket_cap_mb=SMALL, **options)
        buckets = bucket_names(model)
        assert bucket_names(ordinary) == buckets
        for step in range(3):
            step_under(manager, model, rank, step)
            step_on(ordinary, rank, step)
        assert bucket_names(ordinary) != buckets, options
        assert bucket_names(model) == buckets, options

    # They start during backward and are waited for at its end.
    _, _, model = under_manager()
    model.reducer.enable_timeline(1000)
    step_on(model, rank, 0)
    kinds = [event.kind for event in model.reducer.timeline()]
    last = {kind: max(i for i, k in enumerate(kinds) if k == kind) for kind in ("launched", "grad_ready")}
    assert kinds.index("launched") < last["grad_ready"]
    # torchft's own class waits for each bucket before it starts the next
    assert kinds.index("wait_begin") > last["launched"] > kinds.index("launched")


@on_ranks(2)
def test_pure_averages_every_gradient_before_backward_returns(rank):
    module, manager = net(), FakeManager()
    model = PureDistributedDataParallel(manager, module)
    for step in range(3):
        manager.start_quorum()
        if step == 1:  # a backward that raises leaves nothing behind
            output = loss_of(model(batch_of(rank, step)))
            handle = module.first.weight.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                output.backward()
            handle.remove()
        step_on(model, rank, step)
        assert_averages(module, step)
    manager.fails_at = 2
    assert not step_under(manager, model, rank, 4)


@on_ranks(2)
def test_a_failed_step_is_survived_and_the_next_is_right(rank):
    told = []
    notices.listen(told.append)
    for options in each(MODES):
        told.clear()
        module, manager, model = under_manager(**options)
        before = [p.data_ptr() for p in module.parameters()]
        for step in range(8):
            manager.fails_at = {2: 1, 4: 3}.get(step)
            commits = step_under(manager, model, rank, step)
            assert commits == (step not in (2, 4))
            if commits:
                assert_averages(module, step)
            assert [p.data_ptr() for p in module.parameters()] == before
        assert [(notice.kind, notice.details["what"]) for notice in told] == [("retry", "step")] * 2


@on_ranks(2)
def test_weights_that_do_not_arrive_leave_the_step_to_should_commit(rank):
    module, manager, model = under_manager(weighted=True)
    for step, fails_at in enumerate([None, 1, None, 2, None]):
        manager.start_quorum()
        manager.fails_at = fails_at  # the first sum of a step is that of the weights
        manager.heals = fails_at is not None and rank == 0  # such a replica sends zeros
        model.zero_grad()
        for part in torchddp.sync.accumulate(model, 2, weights=[2.0, 2.0]):
            (2 * loss_of(model(batch_of(rank, step + 1000 * part)))).backward()
        assert manager.should_commit() == (fails_at is None)
        if fails_at is None:
            assert_averages(module, step, microbatches=2)


@on_ranks(2)
def test_a_failed_step_cannot_write_to_later_gradients(rank):
    module, manager, model = under_manager()

    def step(number):
        manager.start_quorum()
        loss_of(model(batch_of(rank, number))).backward()
        return [p.grad.untyped_storage().data_ptr() for p in module.parameters()]

    first = step(0)
    assert step(1) == first
    manager.fails_at = 1
    lost = [p.grad for p in module.parameters()]  # kept, so that the allocator can't reuse the memory
    step(2)
    manager.fails_at = None
    model.zero_grad()
    assert not set(step(3)) & set(first), lost


@on_ranks(2)
def test_a_parameter_is_used_if_any_replica_used_it(rank):
    module, manager, model = under_manager(lambda: seeded(Branches), find_unused_parameters=True)
    branches = ("left", "right")
    for step in range(2):
        manager.start_quorum()
        assert_steps(model, rank, [step], lambda m, r, step: m(batch(r, step, 2, 4), branches[r]).sum().backward())
        assert module.left.weight.grad is not None and module.never.weight.grad is None


@on_ranks(2)
def test_reduce_with_gradient_stats_and_one_that_heals(rank):
    module, manager, model = under_manager(checks=Checks(gradient_stats=True))
    with model.no_sync():
        loss_of(model(batch_of(rank, 3))).backward()
    model.reduce()
    assert_averages(module, 3)
    total = sum(p.grad.double().square().sum() for p in module.parameters())
    torch.testing.assert_close(model.gradient_stats()[:, 0].sum(), total, rtol=1e-5, atol=0)

    manager.heals = rank == 1  # torchft sends zeros for it, and divides by the number of participants
    manager.num_participants = lambda: 1
    step_on(model, rank, 0)
    assert_averages(module, 0, ranks=[0])


@on_ranks(1)
def test_without_a_quorum_backward_raises(rank):
    module, manager, model = under_manager()
    manager.quorum = False
    for one in (model, PureDistributedDataParallel(manager, net())):
        with pytest.raises(RuntimeError, match="before manager.start_quorum"):
            step_on(one, rank, 0)

    def none():
        raise TimeoutError("deadline has elapsed")

    manager.num_participants = none
    with pytest.raises(TransportError, match="found no quorum: deadline has elapsed.*Restart the lighthouse"):
        step_on(model, rank, 0)
    del manager.num_participants
    manager.quorum = True
    step_on(model, rank, 0)
    assert_averages(module, 0)


REFUSED = {
    "process_group": "world",
    "init_sync": True,
    "broadcast_buffers": True,
    "transport": "shm",
    "precision": Precision(wire=torch.bfloat16),
    "bucket_cap_mb": "auto",
    "skip_all_reduce_unused_params": True,
    "delay_all_reduce_named_params": [],
}


@on_ranks(1)
def test_bad_input(rank):
    manager = FakeManager()
    for name, value in REFUSED.items():
        with pytest.raises(ValueError, match=f"{name}.*=.*conflicts with a torchft Manager: "):
            DistributedDataParallel(manager, net(), **{name: value})
    with pytest.raises(ValueError, match="embedding '0' has sparse=True"):
        DistributedDataParallel(manager, nn.Sequential(nn.Embedding(4, 4, sparse=True)))
    for wrong in (net(), FakeManager, None):
        for wrapper in (DistributedDataParallel, PureDistributedDataParallel):
            with pytest.raises(TypeError, match=r"manager must be a torchft.Manager, got (a|the class) "):
                wrapper(wrong, net())
    bare = FakeManager()
    bare._pg = None
    with pytest.raises(ValueError, match="no process group.*ProcessGroupGloo"):
        DistributedDataParallel(bare, net())
    with pytest.raises(RuntimeError, match="between ranks, but a torchft Manager only sums: use PowerSGD"):
        DistributedDataParallel(manager, net().float(), comm_hook="int8")
    with pytest.raises(RuntimeError, match="would share its process group with the search for unused"):
        DistributedDataParallel(manager, net().float(), comm_hook="powersgd", find_unused_parameters=True)
    model = DistributedDataParallel(manager, net())
    for attempt in (
        lambda: model.register_comm_hook(None, lambda state, bucket: None),
        model.replan,
        model.join_hook,
        lambda: model.update_process_group(None),
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model),
    ):
        with pytest.raises(RuntimeError, match="doesn't work for a model under a torchft Manager"):
            attempt()


@on_ranks(2)
def test_parameter_averages_are_over_participants(rank):
    module, manager = seeded(small_net, rank), FakeManager()
    averager = PeriodicAverager(manager, module, period=3, warmup_steps=1, bucket_cap_mb=SMALL)
    everyone = [seeded(small_net, other) for other in range(2)]
    mean = [(a + b) / 2 for a, b in zip(*(m.parameters() for m in everyone), strict=True)]
    assert [averager.average_parameters() for _ in range(6)] == [False, True, False, False, True, False]
    torch.testing.assert_close([*module.parameters()], mean)
    assert len(manager.calls) > 1

    before = [p.detach().clone() for p in module.parameters()]
    manager.fails_at = 2
    averager.step = 1
    told = []
    notices.listen(told.append)
    assert not averager.average_parameters()
    assert told == [notices.Notice("retry", {"what": "average", "step": 1})]
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))

    with pytest.raises(ValueError, match="period must be at least 1 step, got 0"):
        PeriodicAverager(manager, module, 0)
    model = DistributedDataParallel(manager, net())
    with pytest.raises(RuntimeError, match="only its gradients can go through it"):
        torchddp.averaging.PeriodicAverager(model, 2, process_group=model.process_group)

    # Thawed and frozen parameters are averaged.
    module = seeded(small_net, rank)
    first, *others = module.parameters()
    first.requires_grad_(False)
    averagers = [PeriodicAverager(FakeManager(), source, period=1) for source in (module, module.parameters())]
    for averager in averagers:
        first.requires_grad_(True)
        others[0].requires_grad_(False)
        with torch.no_grad():
            for param in module.parameters():
                param.fill_(rank)
        assert averager.average_parameters() and all((param == 0.5).all() for param in module.parameters())


class Registering(FakeManager):
    def __init__(self):
        super().__init__()
        self.functions = {}

    def register_state_dict_fn(self, key, load_state_dict, state_dict):
        assert key not in self.functions
        self.functions[key] = (load_state_dict, state_dict)


@on_ranks(1)
def test_state_for_replicas_that_heal(rank):
    manager = Registering()
    models = [DistributedDataParallel(manager, net(), bucket_cap_mb=SMALL, carry_weights=c) for c in (False, True)]
    other = DistributedDataParallel(manager, net(), bucket_cap_mb=10 * SMALL)
    plain, weights, differs = manager.functions.values()
    assert set(plain[1]()) == {"buckets", "hooks"} and set(weights[1]()) == {"buckets", "hooks", "module"}
    healed = DistributedDataParallel(Registering(), small_net(), bucket_cap_mb=SMALL, carry_weights=True)
    ((load, _),) = healed.manager.functions.values()
    load(weights[1]())
    assert all(map(torch.equal, healed.module.parameters(), models[1].module.parameters()))
    load_state_dict(healed, state_dict(models[0]))
    with pytest.raises(RuntimeError, match="replicas differ in bucket 1: here it has last.weight"):
        plain[0](differs[1]())
    with pytest.raises(RuntimeError, match="no such bucket"):
        check_buckets(healed, state_dict(healed)["buckets"][:-1])
    alive = weakref.ref(other)
    del other
    gc.collect()
    assert alive() is None  # the manager doesn't keep the model alive
    assert set(differs[1]()) == {"buckets", "hooks"}

    # Replicas with different hooks.
    with_hook, *_ = with_power_sgd()
    _, _, without = under_manager(layers, bucket_cap_mb=0.004)
    with pytest.raises(RuntimeError, match="here it is none, on the healthy replica .'PowerSGD'"):
        load_state_dict(without, state_dict(with_hook))
    with pytest.raises(RuntimeError, match="BF16 sends messages between ranks"):
        without.register_comm_hook(None, BF16())


NEAR = {"rtol": 1e-4, "atol": 1e-6}


def layers():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 8))


def with_power_sgd(**options):
    """A model with several buckets, its manager and its hook."""
    hook = PowerSGD(2, **options)
    _, manager, model = under_manager(layers, bucket_cap_mb=0.004, comm_hook=hook)
    return model, manager, hook


def grads_of(model):
    return [p.grad.clone() for p in model.parameters()]


@on_ranks(3)
def test_power_sgd_equals_power_sgd_between_fixed_ranks(rank):
    for options in each([{}, {"start_step": 2}, {"warm_start": False}]):
        model, manager, _ = with_power_sgd(**options)
        other = torchddp.DistributedDataParallel(layers(), transport="c10d", comm_hook=PowerSGD(2, **options))
        for step in range(6):
            assert step_under(manager, model, rank, step)
            step_on(other, rank, step)
            assert same_on_all_ranks(grads_of(model))
            torch.testing.assert_close(grads_of(model), grads_of(other), **NEAR)
        whole = sum(p.numel() for p in model.parameters())
        assert 0 < sum(numel for numel, _ in manager.calls) < whole / 2
        assert model.traffic()["hook"].payload_bytes == 4 * whole


@on_ranks(2)
def test_residuals_of_a_failed_step_are_dropped(rank):
    model, manager, _ = with_power_sgd()
    for step in range(4):
        manager.fails_at = 3 if step == 2 else None
        assert step_under(manager, model, rank, step) == (step != 2)
    assert same_on_all_ranks(grads_of(model))
    alone, again, _ = with_power_sgd()
    step_under(again, alone, rank, 3)
    # Like a first step, without earlier residuals or Q.
    torch.testing.assert_close(grads_of(model), grads_of(alone), **NEAR)


@on_ranks(2)
def test_a_healing_replica_continues_with_the_others_factors(rank):
    """It contributes to no sum of the step in which it heals, but gets the others' average."""
    model, manager, hook = with_power_sgd()
    for step in range(3):
        assert step_under(manager, model, rank, step)
    if rank == 1:
        model, manager, hook = with_power_sgd()  # it was restarted
    states = gathered(state_dict(model))
    manager.heals = rank == 1
    assert step_under(manager, model, rank, 3)
    assert same_on_all_ranks(grads_of(model))
    if rank == 1:
        load_state_dict(model, states[0])
        assert not hook.state_dict()["residual"]
        assert set(hook.carried_state()["factors"]) == {"0.weight", "2.weight", "4.weight"}
    manager.heals = False
    for step in (4, 5):
        assert step_under(manager, model, rank, step)
        assert same_on_all_ranks(grads_of(model))
    factors = [hook.carried_state()["factors"][name] for name in ("0.weight", "2.weight", "4.weight")]
    assert same_on_all_ranks(factors)
