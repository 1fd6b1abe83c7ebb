"""Ranks that give different options, hooks, classes or buffers: one error on every rank, or training as in torch."""

import datetime
import os
import re
from dataclasses import fields
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchddp
from tests.harness import each, errors_of, gathered, in_child, on_ranks, over_both
from tests.models import Mlp, assert_steps, seeded, step_on
from torchddp import _C, Checks, ParallelConfig, Precision, _torch, comm_hooks, parallelize
from torchddp.averaging import DiLoCo, HierarchicalAverager, PeriodicAverager
from torchddp.ddp.module import OPTIONS
from torchddp.optim import OSS
from torchddp.sync import even_batches
from torchddp.transport.agreement import TransportExchange

pytestmark = pytest.mark.beyond_torch("hangs, aborts or trains with other numbers")
LIMIT_S = 15.0  # of a collective; errors that are told take milliseconds

# Options that must be equal: a value that the last rank gives instead of the default.
REFUSED = {
    "broadcast_buffers": False,
    "init_sync": False,
    "find_unused_parameters": True,
    "static_graph": True,
    "skip_all_reduce_unused_params": True,
    "forward_sync_buffers": False,
    "transport": "c10d",
    "weighted": True,
    "comm_hook": "fp16",
    "sync": "forced_sync",
    "auto_refresh_trainable": True,
}
# Those with which the ranks train.
ALLOWED = {
    "dim": 1,
    "bucket_cap_mb": 0.001,
    "check_reduction": True,
    "gradient_as_bucket_view": True,
    "bucket_cap_mb_list": [0.0005, 0.001],
    "batched_grad_copy": True,
    "timeout": datetime.timedelta(seconds=100),
}
# Fields of Precision and Checks.
REFUSED_FIELDS = {
    "reduce": torch.float32,
    "main_grads": torch.float32,
    "nonfinite": True,
    "parameters_every": 1,
    "zero_weights": "zeros",
}
ALLOWED_FIELDS = {"stall_report": 0, "gradient_stats": True, "traps": False, "stragglers": False}
# Objects of each rank, devices, and options that need others, below.
ELSEWHERE = {
    "device_ids", "output_device", "process_group", "device_mesh", "delay_all_reduce_named_params",
    "param_to_hook_all_reduce", "mixed_precision", "wire", "main_grads_as",
}  # fmt: skip


def settings(field, value):
    """The argument that has this field."""
    kind = Precision if hasattr(Precision, field) else Checks
    return {kind.__name__.lower(): kind(**{field: value})}


def test_no_option_is_forgotten():
    names = {field.name for kind in (Precision, Checks) for field in fields(kind)}
    assert {*REFUSED_FIELDS, *ALLOWED_FIELDS} == names - ELSEWHERE
    assert {*REFUSED, *ALLOWED, *ELSEWHERE} - names == {*OPTIONS} - {"precision", "checks"}


class WithBuffer(nn.Module):
    def __init__(self, size=3, frozen=2):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(size))
        self.register_buffer("after", torch.arange(3.0))
        self.frozen = nn.Parameter(torch.ones(frozen), requires_grad=False)

    def forward(self, x):
        return self.layer(x)


def ignoring(module, *names):
    module._ddp_params_and_buffers_to_ignore = list(names)
    return module


def train(make):
    model = make()
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


def assert_refused(cases, rank, world_size):
    """Each case is a call that must raise an error with the word on every rank."""
    for name, (kinds, text) in errors_of(
        {n: call for n, (call, _) in cases.items()}, rank, world_size, LIMIT_S
    ).items():
        assert kinds and "TransportError" not in kinds, (name, kinds, text)
        assert re.search(cases[name][1], text), (name, kinds, text)


def given_by_last(rank, world_size, **options):
    """A model with the options on the last rank alone."""
    return torchddp.DDP(WithBuffer(), **(options if rank == world_size - 1 else {}))


@on_ranks(3)
def test_an_option_that_differs_is_named(rank, world_size):
    cases = {
        name: (partial(train, partial(given_by_last, rank, world_size, **{name: value})), name)
        for name, value in REFUSED.items()
    }
    for field, value in REFUSED_FIELDS.items():
        mine = partial(given_by_last, rank, world_size, **settings(field, value))
        cases[field] = partial(train, mine), rf"(precision|checks)\.{field} "
    last = rank == world_size - 1
    kind = {"precision": Precision(main_grads=torch.float32, main_grads_as="grad" if last else "main_grad")}
    cases["main_grads_as"] = lambda: train(lambda: torchddp.DDP(WithBuffer(), **kind)), "main_grads_as"
    wire = {"transport": "shm", "precision": Precision(wire=torch.bfloat16 if last else torch.float16)}
    cases["wire"] = lambda: train(lambda: torchddp.DDP(WithBuffer(), **wire)), "wire_dtype"
    assert_refused(cases, rank, world_size)


@pytest.mark.parametrize(("transport", "late"), [("shm", False), ("c10d", True)])
@on_ranks(3)
def test_options_of_which_each_rank_has_its_own(rank, transport, late):
    """bucket_cap_mb: rank 0's, also if it is planned there; a first bucket that a program has changed."""
    given = [{name: value} for name, value in ALLOWED.items()]
    for options in each(given + [settings(field, value) for field, value in ALLOWED_FIELDS.items()]):
        mine = options if (rank == 0) != late else {}
        model = torchddp.DDP(seeded(Mlp), transport=transport, **mine)
        assert_steps(model, rank, range(3))
        plans = gathered([list(bucket.params) for bucket in model.reducer.plan.buckets])
        assert plans[0] == plans[1] == plans[2]
    for caps in each([("auto", 0.001), (0.001, "auto"), (None, "auto")]):
        model = torchddp.DDP(seeded(Mlp), transport=transport, bucket_cap_mb=caps[rank > 0])
        assert_steps(model, rank, range(12))
    if rank == 1:
        dist._DEFAULT_FIRST_BUCKET_BYTES = 100
    assert_steps(torchddp.DDP(seeded(Mlp), transport=transport), rank, range(3))


def registered(rank, register, module=None, on=(0,), **options):
    """A model that only these ranks register something with."""
    model = torchddp.DDP(module or nn.Linear(4, 4), **options)
    if rank in on:
        register(model)
    return model


def hooked(rank, hook, state=None, **options):
    return registered(rank, lambda model: model.register_comm_hook(state, hook), **options)


def power_sgd(rank):
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1 + rank, start_powerSGD_iter=2)


@pytest.mark.parametrize(("transport", "world_size"), [("c10d", 2), ("shm", 3)])
@on_ranks()
def test_hooks_that_differ_are_named(rank, transport, world_size):
    fp16, bf16 = default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook
    of_torch = powerSGD_hook.powerSGD_hook
    wrapped = default_hooks.fp16_compress_wrapper if rank else default_hooks.bf16_compress_wrapper
    everywhere = range(world_size)
    hooked_here = partial(partial, hooked, rank, transport=transport)
    own_inner = comm_hooks.Int4() if rank else comm_hooks.Int8()

    def by_rule(selector, hook):
        return hooked_here(comm_hooks.PerParameter(None, [(selector, hook)]), on=everywhere)

    made = {
        "on one rank": (hooked_here(fp16), "comm_hook is fp16_compress_hook on rank 0, no hook on rank 1"),
        "on the others": (hooked_here(fp16, on=range(1, world_size)), "comm_hook is no hook on rank 0, fp16_compress"),
        "two kinds": (hooked_here(bf16 if rank else fp16, on=everywhere), "fp16_compress_hook.*bf16_compress_hook"),
        "two states": (hooked_here(of_torch, power_sgd(rank), on=everywhere), "matrix_approximation_rank=1.*=2"),
        "two wrappers": (hooked_here(wrapped(of_torch), power_sgd(0), on=everywhere), "bf16_compress_wrapper.*fp16"),
        "ours on one": (hooked_here(comm_hooks.FP16()), "comm_hook is FP16.* on rank 0, no hook"),
        "ours and torch's": (hooked_here(fp16 if rank else comm_hooks.FP16(), on=everywhere), "FP16.*fp16_compress"),
        "ranks of ours": (hooked_here(comm_hooks.PowerSGD(rank=1 + rank), on=everywhere), "rank=1.*rank=2"),
        "rules": (by_rule("*", own_inner), "Int8.*Int4"),
        "choices": (
            by_rule(lambda name, _: name.endswith(("bias", "weight")[rank > 0]), comm_hooks.FP16()),
            "PerParameter.*choices=.* on rank 0, .*choices=",
        ),
        "seeds": (hooked_here(of_torch, powerSGD_hook.PowerSGDState(None, random_seed=rank), on=everywhere), "rng="),
        "failing rule": (by_rule(lambda name, parameter: 1 / 0 if rank == 1 else True, None), "by zero"),
        # The first step begins with a broadcast of buffers, before it comes to gradients.
        "with buffers": (partial(hooked, rank, bf16, module=WithBuffer()), "bf16_compress_hook"),
        "built in": (
            partial(registered, rank, lambda m: m._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)),
            "FP16_COMPRESS",
        ),
        "of buffers": (
            partial(registered, rank, lambda m: m._register_buffer_comm_hook(None, lambda *_: []), WithBuffer()),
            "for buffers",
        ),
        # The error of rank 1 reaches the others in their first step.
        "broken": (
            partial(hooked, rank, default_hooks.allreduce_hook if rank != 1 else lambda: None, on=everywhere),
            "callable as hook",
        ),
    }
    assert_refused({name: (partial(train, make), words) for name, (make, words) in made.items()}, rank, world_size)


@over_both
@on_ranks(2)
def test_models_that_differ_in_what_is_copied(rank, transport):
    def wrapped(make, **options):
        return partial(train, lambda: torchddp.DDP(make(), transport=transport, **options))

    only_here = f"own_{rank}"

    def with_own():
        module = WithBuffer()
        module.register_buffer(only_here, torch.ones(1 + rank))
        return ignoring(module, only_here)

    train(lambda: torchddp.DDP(with_own(), transport=transport))  # what others don't have may be ignored
    train(lambda: torchddp.DDP(WithBuffer(3 + rank), transport=transport, broadcast_buffers=False))
    cases = {
        "shape": (wrapped(lambda: WithBuffer(3 + 2 * rank)), r"buffers\[0\] 'mask' has sizes \[5\]; on rank 0 .*\[3\]"),
        "dtype": (wrapped(lambda: WithBuffer().to([torch.float32, torch.float64][rank])), "dtype"),
        "late": (wrapped(lambda: WithBuffer(3 + rank), init_sync=False), "'mask'"),
        "ignored": (wrapped(lambda: ignoring(WithBuffer(), *["mask"] * rank)), "'mask' is in parameters_to_ignore"),
        "others": (wrapped(lambda: ignoring(WithBuffer(), ["mask", "after"][rank])), "parameters_to_ignore"),
        "frozen": (wrapped(lambda: WithBuffer(frozen=2 + rank)), r"frozen\[0\] 'frozen'"),
    }
    assert_refused(cases, rank, 2)


@on_ranks(3)
def test_classes_and_their_own_options(rank, world_size):
    def sharded(**options):
        module = nn.Linear(4, 4)
        return torchddp.ShardedDataParallel(module, OSS(module.parameters(), torch.optim.SGD, lr=0.1), **options)

    def replicated(**options):
        return torchddp.replicate(nn.Linear(4, 4), **options)

    def oss(optim=torch.optim.SGD, **options):
        return OSS(nn.Linear(4, 4).parameters(), **{"optim": optim, "lr": 0.1, **options})

    def loaded(lr):
        optimizer = oss()
        state = optimizer.local_state_dict()
        state["param_groups"][0]["lr"] = lr
        optimizer.load_state_dict(state)

    def averager(**options):
        return PeriodicAverager(nn.Linear(4, 4), **{"period": 2, **options})

    def diloco(**options):
        module = nn.Linear(4, 4)
        return DiLoCo(module, torch.optim.SGD(module.parameters(), 0.1), **{"sync_every": 4, **options})

    def stepped(change):
        optimizer = diloco(sync_every=2)
        change(optimizer)
        for _ in range(4):
            optimizer.step()

    def averaged(step):
        late = averager(period=2)
        late.step = step
        late.average_parameters()

    def synced(src=0, size=2):
        model = torchddp.DDP(nn.Linear(4, 4))
        model.module.register_buffer("late", torch.ones(size))
        model.sync_module_states(src)

    last = rank == world_size - 1
    size = world_size
    ours, torchs = torchddp.DDP, TorchDDP
    half = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    cases = {
        "torch's": (lambda: (torchs if last else ours)(nn.Linear(4, 4)), "same class|inconsistent"),
        "sharded": (lambda: sharded() if last else ours(nn.Linear(4, 4)), "OSS on rank|different calls"),
        "replicated": (lambda: replicated() if last else ours(nn.Linear(4, 4)), "different calls.*replicate"),
        "mp_policy": (lambda: replicated(mp_policy=half if last else None), "mp_policy"),
        "class": (lambda: oss(torch.optim.AdamW if last else torch.optim.SGD), "optim is SGD.*AdamW on rank"),
        "group option": (lambda: oss(lr=0.2 if last else 0.1), "lr of group 0 is 0.1"),
        "fp16": (lambda: oss(broadcast_fp16=last), "broadcast_fp16"),
        "buffer size": (lambda: oss(broadcast_buffer_size=10 if last else 20), "broadcast_buffer_size"),
        "period": (lambda: averager(period=2 + last), "period"),
        "warmup": (lambda: averager(warmup_steps=0 + last), "warmup_steps"),
        "levels": (lambda: HierarchicalAverager(nn.Linear(4, 4), {2 + last: size}), "periods"),
        "params": (lambda: averager(period=1).average_parameters(nn.Linear(4, 5 - last)), "same parameters"),
        "norm_type": (lambda: oss().clip_grad_norm(1.0, 1.0 if last else float("inf")), "norm_type is inf on rank 0"),
        "max_norm": (lambda: oss().clip_grad_norm(2.0 if last else 1.0), "max_norm is 1.0 on rank 0"),
        "loaded": (lambda: loaded(0.2 if last else 0.1), "lr of group 0 is 0.1"),
        "outer": (lambda: diloco(outer_lr=0.5 if last else 0.6), "outer_lr"),
        "outer later": (lambda: stepped(lambda d: d.outer_optimizer.param_groups[0].update(lr=0.1 + last)), "lr: "),
        "steps": (lambda: stepped(lambda d: setattr(d, "steps", 2 * last)), "step [24] with"),
        "step": (lambda: averaged(2 * last), "step is 0 on rank 0"),
        "outer optimizer": (
            lambda: diloco(outer_optimizer=lambda p: torch.optim.SGD(p, 1 + last)),
            "outer_optimizer is SGD",
        ),
        "kind": (lambda: parallelize(nn.Linear(4, 4), ParallelConfig("fsdp" if last else "ddp")), "kind is ddp"),
        "source": (lambda: synced(src=int(last)), "src is 0 on rank 0"),
        "no source": (lambda: synced(src=9 if last else 0), "src must be a rank"),
        "states": (lambda: synced(size=3 if last else 2), "'late'"),
        **{
            name: (lambda name=name, value=value: sharded(**({name: value} if last else {})), name)
            for name, value in {
                "reduce_fp16": True,
                "sync_models_at_startup": False,
                "overlap_gather": False,
                "reduce_buffer_size": 100,
                "static_graph": True,
                "weighted": True,
            }.items()
        },
    }
    assert_refused(cases, rank, world_size)


@on_ranks(3)
def test_an_error_of_one_rank_reaches_all(rank, world_size):
    """At each collective entry point, also if that rank finds it before it has anything to compare."""
    last = rank == world_size - 1
    module = nn.Linear(4, 4)

    def oss():
        return OSS(module.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    def clip():
        optimizer = oss()
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.clip_grad_norm(1.0, norm_type=-1 if last else 2)

    def load():
        optimizer = oss()
        optimizer.load_state_dict({} if last else {**optimizer.local_state_dict()})

    def outer(params):
        return torch.optim.SGD(params, 1 / 0 if last else 1)

    def no_room(wrap):
        with mock.patch.object(_C, "Reducer", side_effect=MemoryError("no room") if last else _C.Reducer):
            wrap()

    def refresh():
        model = torchddp.DDP(nn.Linear(4, 4))
        if last:
            model.module.named_parameters = mock.Mock(side_effect=ValueError("no parameters here"))
        model.refresh_trainable()

    bad = partial(torchddp.DDP, module)
    cases = {
        "option": (lambda: bad(bucket_cap_mb=-1 if last else None), "bucket_cap_mb"),
        "device": (lambda: bad(device_ids=[0] if last else None), "device_ids"),
        "module": (lambda: torchddp.DDP(nn.ReLU() if last else module), "require"),
        "buckets": (lambda: no_room(partial(bad, transport="c10d")), "no room"),
        "new buckets": (lambda: no_room(bad(transport="c10d").refresh_trainable), "no room"),
        "hook name": (lambda: bad(comm_hook="fp17" if last else "fp16"), "fp17"),
        "precision": (
            lambda: bad(precision=Precision(main_grads=torch.float16 if last else torch.float32)),
            "main_grads",
        ),
        "replicate": (lambda: torchddp.replicate(nn.ReLU() if last else nn.Linear(2, 2)), "requires grad"),
        "OSS": (lambda: OSS([] if last else module.parameters(), torch.optim.SGD, lr=0.1), "empty|parameters"),
        "OSS class": (lambda: OSS(module.parameters(), int if last else torch.optim.SGD, lr=0.1), "class"),
        "sharded": (lambda: torchddp.ShardedDataParallel(module, None if last else oss()), "OSS"),
        "group": (lambda: oss().add_param_group({"params": [] if last else [nn.Parameter(torch.ones(2))]}), "param"),
        "recipient": (lambda: oss().consolidate_state_dict(-1 if last else 0), "recipient_rank"),
        "clip": (clip, "norm_type"),
        "clip types": (lambda: oss().clip_grad_norm(1.0, norm_type="x" if last else 2), "norm_type|convert"),
        "levels": (lambda: HierarchicalAverager(module, None if last else {2: world_size}), "iterable"),
        "outer": (lambda: DiLoCo(module, torch.optim.SGD(module.parameters(), 0.1), 2, outer_optimizer=outer), "zero"),
        "load": (load, "not an optimizer's state dict"),
        "period": (lambda: PeriodicAverager(module, 0 if last else 1), "period"),
        "refresh": (refresh, "no parameters here"),
        "averaged": (lambda: PeriodicAverager([1] if last else module, 2), "parameter"),
    }
    assert_refused(cases, rank, world_size)


@on_ranks(2)
def test_what_agreeing_costs(rank, monkeypatch):
    """A first step compares hooks once; later ones send nothing more. init_sync=False sends nothing at construction."""
    sent = []

    def counted(module, name):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: sent.append(name) or original(*args, **kwargs))

    counted(dist, "all_gather")
    counted(_torch, "broadcast_coalesced")
    gather = TransportExchange.gather
    monkeypatch.setattr(TransportExchange, "gather", lambda *args: sent.append("digest") or gather(*args))
    model = torchddp.DDP(seeded(Mlp))
    sent.clear()
    step_on(model, rank)
    assert sent == ["digest"]
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    step_on(model, rank)
    assert sent == ["digest"] * 2
    for step in range(4):
        step_on(model, rank, step)
    assert sent == ["digest"] * 2
    sent.clear()
    module = seeded(Mlp, rank)
    before = [parameter.clone() for parameter in module.parameters()]
    late = torchddp.DDP(module, init_sync=False)
    assert sent == [] and all(map(torch.equal, before, module.parameters()))
    step_on(late, rank)
    assert sent == ["all_gather"]


ENTRIES = {
    "constructor": lambda model, oss, averager: torchddp.DDP(nn.Linear(4, 4)),
    "hook": lambda model, oss, averager: model.register_comm_hook(None, comm_hooks.FP16()),
    "first step": lambda model, oss, averager: model(torch.ones(2, 4)).sum().backward(),
    "refresh": lambda model, oss, averager: model.refresh_trainable(),
    "OSS": lambda model, oss, averager: OSS(model.parameters(), torch.optim.SGD, lr=0.1),
    "group": lambda model, oss, averager: oss.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "owners": lambda model, oss, averager: oss.refresh_trainable(),
    "load": lambda model, oss, averager: oss.load_state_dict(oss.local_state_dict()),
    "consolidate": lambda model, oss, averager: oss.consolidate_state_dict(),
    "clip": lambda model, oss, averager: oss.clip_grad_norm(1.0),
    "step": lambda model, oss, averager: oss.step(),
    "averager": lambda model, oss, averager: PeriodicAverager(model, 2),
    "average": lambda model, oss, averager: averager.average_now(),
}


@pytest.mark.parametrize("entry", ENTRIES)
@on_ranks(3, needed_ranks=[0, 2], group_timeout_s=LIMIT_S)
def test_a_dead_peer_is_named_everywhere(rank, entry):
    model = torchddp.DDP(nn.Linear(4, 4))
    oss = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    averager = PeriodicAverager(model, 2)
    dist.barrier()
    if rank == 1:
        os._exit(0)
    with pytest.raises(torchddp.TransportError, match="rank 1 (is gone|died|is missing)"):
        ENTRIES[entry](model, oss, averager)


@over_both
@on_ranks(2)
def test_a_forked_child_waits_for_no_rank(rank, transport):
    """It has no thread that would end a wait, and must not answer in the rank's name."""
    model = torchddp.DDP(nn.Linear(4, 4), transport=transport)
    oss = OSS(model.parameters(), torch.optim.SGD, lr=0.1)
    averager = PeriodicAverager(model, 2)
    list(even_batches([1], model))
    others = {"survivors": lambda *_: torchddp.survivors(), "batches": lambda *_: list(even_batches([1], model))}
    for call in each((ENTRIES | others).values()):

        def body(call=call):
            with pytest.raises(torchddp.TransportError, match="this process was forked"):
                call(model, oss, averager)

        assert in_child(body)
    assert torchddp.survivors() == [0, 1]
    assert_steps(torchddp.DDP(seeded(Mlp), transport=transport), rank, range(2))


@on_ranks(2)
def test_a_rank_that_cannot_make_its_buckets_does_not_keep_the_others_waiting(rank):
    kind, text = (MemoryError, "no room") if rank == 1 else (torchddp.TransportError, "rank 1 gave up")
    with mock.patch.object(_C, "Reducer", side_effect=MemoryError("no room") if rank == 1 else _C.Reducer):
        with pytest.raises(kind, match=text):
            torchddp.DDP(nn.Linear(3, 3), transport="shm", timeout=20)
    torchddp.DDP(nn.Linear(3, 3), transport="shm")(torch.ones(1, 3)).sum().backward()
