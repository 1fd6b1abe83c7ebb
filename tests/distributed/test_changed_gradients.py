"""Warnings, once, of gradients that only some ranks change, and of models changed after wrapping; none otherwise."""

import contextlib
import copy
import dataclasses
import gc
import pickle
import sys
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

import torchddp
import torchddp.optim
import torchddp.sync
from tests.harness import each, gathered, on_ranks, over_both
from tests.models import Mlp, batch, loss_of, seeded
from torchddp import Checks
from torchddp.diagnose import changed_gradients
from torchddp.diagnose.changed_gradients import next_look
from torchddp.transport.worker import BoundedCalls

pytestmark = pytest.mark.beyond_torch("tells of no traps")


@contextlib.contextmanager
def caught_warnings():
    """The block's UsageWarnings, as (text, line), available after it."""
    told = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
    found = [w for w in caught if issubclass(w.category, torchddp.UsageWarning)]
    assert all(w.filename == __file__ for w in found), [w.filename for w in found]
    told += [(str(w.message), w.lineno) for w in found]


def only_one(told):
    """The one warning, which rank 0 gave (collective)."""
    first, *others = gathered(told)
    assert len(first) == 1 and not any(others), (first, others)
    return first[0]


def made(transport="auto", make=Mlp, **options):
    ddp = torchddp.DDP(seeded(make), transport=transport, bucket_cap_mb=0.001, **options)
    return ddp, torch.optim.SGD(ddp.parameters(), 0.01)


def steps(optimizer, count=6):
    for step in range(count):
        optimizer.zero_grad()
        yield step
        optimizer.step()


def train(ddp, optimizer, rank, count=6):
    for step in steps(optimizer, count):
        loss_of(ddp(batch(rank, step))).backward()


def clip(parameters):
    torch.nn.utils.clip_grad_norm_(parameters, 0.1)


CHANGES = [
    (clip, "changed"),
    (lambda parameters: setattr(parameters[0], "grad", None), "set to None"),
    (lambda parameters: parameters[0].grad.mul_(2), "changed"),
    (lambda parameters: parameters[0].grad.data.mul_(2), "changed"),
    (lambda parameters: setattr(parameters[0], "grad", parameters[0].grad * 2), "replaced by another tensor"),
]


@over_both
@on_ranks(3)
def test_gradients_changed_on_one_rank(rank, transport):
    for (change, words), views in each(CHANGES, [None, False, True]):
        ddp, optimizer = made(transport, gradient_as_bucket_view=views)
        with caught_warnings() as told:
            for step in range(4):
                optimizer.zero_grad()
                loss_of(ddp(batch(rank, step))).backward()
                if rank == 1:
                    change(list(ddp.parameters()))
                optimizer.step()
                here = sys._getframe().f_lineno - 1
        text, at = only_one(told)
        assert at == here
        assert f"'first.weight' was {words} on rank 1; unchanged on ranks 0 and 2" in text
        assert ("also differ on 'first.bias', 'middle.weight' and 2 more" in text) == (change is clip)


@on_ranks(2)
def test_which_steps_are_checked(rank):
    """Few are: 1, 2, 3, 4, 8, 16, ... Another process group restarts the sequence."""
    assert [next_look(step) for step in (0, 1, 2, 3, 4, 7, 8, 9, 16)] == [1, 2, 3, 4, 8, 8, 16, 16, 32]
    for other_group in each([False, True]):
        ddp, optimizer = made()
        train(ddp, optimizer, rank, 4)
        if other_group:
            ddp.update_process_group(dist.new_group([0, 1]))
        with caught_warnings() as told:
            for step in steps(optimizer, 7):
                loss_of(ddp(batch(rank, step))).backward()
                if rank == int(other_group):
                    clip(ddp.parameters())
        assert f"(synchronized step {1 if other_group else 8})" in only_one(told)[0]


@on_ranks(2)
def test_a_program_without_torchs_optimizers_is_checked_in_few_steps(rank):
    (ddp, optimizer), noted = made(), []
    with caught_warnings() as told:
        for step in range(46):
            loss_of(ddp(batch(rank, step))).backward()
            if step < 14:
                noted.append(bool(ddp.reducer.changed_gradients()))
            elif step % 15 == 14:  # one that steps seldom
                (clip if rank == 1 else list)(ddp.parameters())
                optimizer.step()
    assert noted == [step < 6 or 7 <= step < 13 for step in range(14)]
    assert "(synchronized step 30)" in only_one(told)[0]


@on_ranks(2)
def test_models_of_other_threads(rank):
    """torch raised if a hook came or went during the step of another thread's optimizer."""
    ddp, optimizer = made()
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    meanwhile = register_optimizer_step_pre_hook(
        lambda stepping, *_: train(ddp, optimizer, rank, 1) if stepping is plain else None
    )
    for _ in range(10):
        plain.step()
    meanwhile.remove()


@on_ranks(2)
def test_checking_gradients_leaves_nothing_behind(rank):
    ddp, optimizer = made(checks=Checks(stall_report=0))  # the hang monitor sends too
    counts = []
    for _ in range(7):
        train(ddp, optimizer, rank, 1)
        counts.append(len(changed_gradients._listening))
    ddp.observers.close()
    assert counts[:4] == [1] * 4 and counts[5:] == [0, 0] and not changed_gradients._listening, counts
    gone = weakref.ref(ddp)
    del ddp, optimizer
    gc.collect()
    assert gone() is None

    # Nothing is sent in steps that are not checked.
    sent, call = [], BoundedCalls.call
    BoundedCalls.call = lambda self, do, *limit: (sent.append(do), call(self, do, *limit))[1]
    ddp, optimizer = made(checks=Checks(stall_report=0, stragglers=False))  # what looks for slow ranks sends, by time
    counts = []
    for count in (17, 14, 1):  # steps 16 and 32 are checked
        train(ddp, optimizer, rank, count)
        counts.append(len(sent))
    assert 0 < counts[0] == counts[1] < counts[2]


class Right:
    """Correct programs."""

    plain = train

    def accumulation(ddp, optimizer, rank):
        for step in steps(optimizer):
            with ddp.no_sync():
                for i in range(2):
                    loss_of(ddp(batch(rank, 10 * step + i))).backward()
            loss_of(ddp(batch(rank, 10 * step + 3))).backward()

    def accumulation_in_the_loop(ddp, optimizer, rank):
        for strategy in ("single_auto_sync", "multi_auto_sync", "forced_sync"):
            for _ in steps(optimizer, 2):
                for i in torchddp.sync.accumulate(ddp, 3, strategy):
                    (loss_of(ddp(batch(rank, i))) / 3).backward()

    def local_steps(ddp, optimizer, rank):
        with ddp.no_sync():
            train(ddp, optimizer, rank, 4)
        train(ddp, optimizer, rank, 2)

    def closures(ddp, optimizer, rank):
        """Closures, as Lightning calls the optimizer."""
        for step in range(10):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(ddp(batch(rank, step)))
                loss.backward()
                clip(ddp.parameters())
                return loss

            optimizer.step(closure)

    def accumulating_closures(ddp, optimizer, rank):
        """As in Lightning, with a layer that one rank doesn't use in the first microbatch of each step."""

        class Uneven(Mlp):
            def forward(self, x, uses_middle):
                x = self.first(x)
                return self.last(self.middle(x) if uses_middle else x.repeat(1, 2)[:, : 3 * self.width])

        ddp, optimizer = made(ddp.reducer.transport_name, Uneven, find_unused_parameters=True)
        for step in range(10):

            def closure(step=step):
                loss = loss_of(ddp(batch(rank, step), rank == 0 or step % 2 == 1))
                if step % 2 == 0:
                    optimizer.zero_grad()
                loss.backward()
                return loss

            if step % 2 == 0:
                with ddp.no_sync():
                    closure()
            else:
                optimizer.step(closure)

    def dry_run_and_local_steps(ddp, optimizer, rank):
        ddp(batch(rank, 0))
        with ddp.no_sync():
            train(ddp, optimizer, rank, 4)
        train(ddp, optimizer, rank, 2)

    def lbfgs(ddp, optimizer, rank):
        Right.closures(ddp, torch.optim.LBFGS(ddp.parameters(), max_iter=3), rank)

    def two_optimizers(ddp, optimizer, rank):
        parameters = list(ddp.parameters())
        halves = [torch.optim.Adam(parameters[:2]), torch.optim.AdamW(parameters[2:], fused=True)]
        for step in range(6):
            ddp.zero_grad()
            loss_of(ddp(batch(rank, step))).backward()
            for half in halves:
                half.step()

    def scaler(ddp, optimizer, rank):
        grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(6):
            optimizer.zero_grad()
            grad_scaler.scale(loss_of(ddp(batch(rank, step)))).backward()
            grad_scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            grad_scaler.step(optimizer)
            grad_scaler.update()

    def logging_on_rank_0(ddp, optimizer, rank):
        for step in steps(optimizer):
            loss_of(ddp(batch(rank, step))).backward()
            if rank == 0:
                [(p.grad.norm().item(), p.grad.clone(), p.grad.data.abs().max()) for p in ddp.parameters()]

    def zeroed_in_place(ddp, optimizer, rank):
        for step in range(6):
            loss_of(ddp(batch(rank, step))).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    def uneven_inputs(ddp, optimizer, rank):
        train(ddp, optimizer, rank, 2)
        with ddp.join():
            train(ddp, optimizer, rank, 3 + 2 * rank)
        train(ddp, optimizer, rank, 3)

    def compiled(ddp, optimizer, rank):
        outer, inside = torchddp.DDP(seeded(Mlp)), torchddp.DDP(torch.compile(seeded(Mlp), backend="eager"))
        for model in (torch.compile(outer, backend="eager"), inside):
            train(model, torch.optim.SGD(model.parameters(), 0.01), rank)

    def compiled_optimizer(ddp, optimizer, rank):
        step = torch.compile(optimizer.step, backend="eager")
        for i in range(6):
            optimizer.zero_grad()
            loss_of(ddp(batch(rank, i))).backward()
            step()

    def retained_graph(ddp, optimizer, rank):
        for step in steps(optimizer, 4):
            loss_of(ddp(batch(rank, step))).backward(retain_graph=True)

    def sharded_optimizers(ddp, optimizer, rank):
        train(ddp, torchddp.optim.OSS(ddp.parameters(), torch.optim.SGD, lr=0.01), rank)
        train(ddp, ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.01), rank)

    def optimizers_in_hooks(ddp, optimizer, rank):
        """One optimizer per parameter, which steps during backward."""
        optimizers = {p: torch.optim.SGD([p], 0.01) for p in ddp.module.last.parameters()}
        for parameter in optimizers:
            parameter.register_post_accumulate_grad_hook(lambda parameter: optimizers[parameter].step())
        train(ddp, torch.optim.SGD(ddp.module.first.parameters(), 0.01), rank)

    def gradients_changed_on_all_ranks(ddp, optimizer, rank):
        for change, _ in CHANGES:
            ddp, optimizer = made(ddp.reducer.transport_name)
            for step in steps(optimizer, 10):
                loss_of(ddp(batch(rank, step))).backward()
                change(list(ddp.parameters()))

    def checkpoints(ddp, optimizer, rank):
        for reentrant in (False, True):

            class Checkpointed(Mlp):
                def forward(self, x, reentrant=reentrant):
                    return checkpoint(super().forward, x, use_reentrant=reentrant)

            inside, other = made(make=Checkpointed)
            for step in steps(optimizer):
                loss_of(checkpoint(ddp, batch(rank, step).requires_grad_(), use_reentrant=reentrant)).backward()
            for step in steps(other):
                loss_of(inside(batch(rank, step).requires_grad_())).backward()

    def sharded_and_replicated_models(ddp, optimizer, rank):
        module = seeded(Mlp)
        optimizer = torchddp.optim.OSS(module.parameters(), torch.optim.SGD, lr=0.01)
        train(torchddp.ShardedDataParallel(module, optimizer), optimizer, rank)
        replicated = torchddp.replicate(seeded(Mlp))
        train(replicated, torch.optim.SGD(replicated.parameters(), 0.01), rank)


# Those whose graph is the same in every step.
STATIC = [
    "plain",
    "accumulation",
    "local_steps",
    "dry_run_and_local_steps",
    "closures",
    "lbfgs",
    "two_optimizers",
    "optimizers_in_hooks",
    "scaler",
]


@on_ranks(2)
def test_correct_programs_get_no_warning(rank):
    names = [(name, False) for name in vars(Right) if not name.startswith("_")]
    for name, static_graph in each([*names, *((name, True) for name in STATIC)]):
        ddp, optimizer = made(static_graph=static_graph)
        with caught_warnings() as told:
            getattr(Right, name)(ddp, optimizer, rank)
        assert told == []


@dataclasses.dataclass
class Output:
    loss: torch.Tensor


class Keeping(Mlp):
    def forward(self, x):
        self.loss = loss_of(super().forward(x))
        return Output(self.loss)


@on_ranks(2)
def test_a_static_graph_that_cannot_see_the_loss(rank):
    """Nothing is averaged, as in torch, which says nothing."""
    losses = [lambda ddp, output: output.loss, lambda ddp, output: ddp.module.loss]
    for loss, static_graph, ranks in each(losses, [True, False], [2, 1]):
        ddp, optimizer = made(
            make=Keeping, static_graph=static_graph, process_group=dist.new_group([rank]) if ranks == 1 else None
        )
        with caught_warnings() as told:
            for step in steps(optimizer, 3):
                loss(ddp, ddp(batch(rank, step))).backward()
        if static_graph and ranks == 2:
            assert only_one(told)[0].startswith("An optimizer steps with gradients that were not averaged. With static")
        else:
            assert not told


@on_ranks(2)
def test_optimizers_that_step_without_the_gradients(rank):
    """A plain one with a sharded model, and one that doesn't know of main gradients."""

    def sharded():
        module = seeded(Mlp)
        oss = torchddp.optim.OSS(module.parameters(), torch.optim.SGD, lr=0.01)
        return torchddp.ShardedDataParallel(module, oss), module, oss

    def main_grads(**how):
        module = seeded(Mlp).bfloat16()
        precision = torchddp.Precision(main_grads=torch.float32, **how)
        return torchddp.DDP(module, precision=precision), module, None

    def steps_copies(ddp, module, optimizer):
        copies = [p.detach().float() for p in module.parameters()]
        for copy_, p in zip(copies, module.parameters(), strict=True):
            copy_.grad = p.main_grad
        torch.optim.SGD(copies, 0.01).step()

    def plain(ddp, module, oss):
        torch.optim.SGD(module.parameters(), 0.01).step()

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure=None):
            self.inner.step()

    def with_closure(ddp, module, _):
        def closure():
            for p in module.parameters():
                p.grad = p.main_grad.to(p.dtype)
            return 0.0

        torch.optim.SGD(module.parameters(), 0.01).step(closure)
        module.zero_grad()

    cases = {
        "sharded": (sharded, plain, "SGD steps parameters of a ShardedDataParallel"),
        "sharded, right": (sharded, lambda ddp, module, oss: oss.step(), ""),
        "sharded, wrapped": (sharded, lambda ddp, module, oss: Wrapper(oss).step(), ""),
        "main_grad": (main_grads, plain, "SGD steps parameters whose .grad is None"),
        "main_grad, right": (main_grads, steps_copies, ""),
        "main_grad, in a closure": (main_grads, with_closure, ""),
        "grad": (lambda: main_grads(main_grads_as="grad"), plain, ""),
    }
    for name in each(cases):
        make, step, words = cases[name]
        ddp, module, optimizer = make()
        with caught_warnings() as told:
            for i in range(4):
                loss_of(ddp(batch(rank, i).to(next(module.parameters()).dtype))).backward()
                step(ddp, module, optimizer)
        if words:
            assert only_one(told)[0].startswith(words)
        else:
            assert not told


OLD_STEPS = 3
SEARCH = {"find_unused_parameters": True}


def net():
    return seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))


def train_net(model, steps=4, dtype=torch.float32):
    for step in range(steps):
        model.zero_grad()
        model(torch.full((2, 4), 1.0 + step, dtype=dtype)).sum().backward()


def copied(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def load(model):
    model.load_state_dict(copied(model), assign=True)


CONVERTED = "were converted to another dtype or device"
REPLACED = "were replaced by other parameters"
# By change: the dtype after it, and the warning's words.
MODEL_CHANGES = {
    "converted": (nn.Module.double, torch.float64, rf"0\.weight \(torch\.float32 to torch\.float64\), .* {CONVERTED}"),
    "converted_inside": (lambda model: model.module.bfloat16(), torch.bfloat16, rf"torch\.bfloat16\), .* {CONVERTED}"),
    "converted_and_back": (lambda model: model.double().float(), torch.float32, rf"0\.weight, 0\.bias, .* {CONVERTED}"),
    "loaded": (load, torch.float32, rf"0\.weight, 0\.bias, .* {REPLACED} \(load_state_dict with assign=True"),
    "loaded_inside": (lambda model: load(model.module), torch.float32, REPLACED),
}


@on_ranks(2)
def test_lost_parameters_are_named_once(rank):
    cases = [(name, options, steps) for name in MODEL_CHANGES for options in ({}, SEARCH) for steps in (0, OLD_STEPS)]
    for name, options, old_steps in each([*cases, ("loaded_inside", {"static_graph": True}, OLD_STEPS)]):
        change, dtype, words = MODEL_CHANGES[name]
        model = torchddp.DDP(net(), **options)
        train_net(model, old_steps)
        change(model)
        with pytest.warns(UserWarning, match=words) as caught:
            train_net(model, dtype=dtype)
        (told,) = [w for w in caught if "was changed after it was wrapped" in str(w.message)]
        assert f"rank {rank}" in str(told.message) and told.filename == __file__
        assert ("auto_refresh_trainable=True does this" in str(told.message)) == ("loaded" in name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train_net(model, 8, dtype)
    # A single layer is named.
    model = torchddp.DDP(seeded(Mlp), find_unused_parameters=True)
    load(model.module.last)
    with pytest.warns(UserWarning, match=r": last\.weight was replaced by other parameters"):
        loss_of(model(batch(rank))).backward()


class Silent:
    """Changes after which nothing is lost."""

    def without_backward(model):
        for _ in range(9):
            model(torch.ones(2, 4))

    def two_forwards_a_backward(model):
        for _ in range(9):
            (model(torch.ones(2, 4)) + model(torch.zeros(2, 4))).sum().backward()

    def with_other_tensors(model):
        for kind in (
            lambda p: p.detach().clone().requires_grad_(),
            lambda p: nn.Parameter(p.detach().clone()),
            lambda p: p,
        ):
            for _ in range(5):
                tensors = {name: kind(p) for name, p in model.named_parameters()}
                functional_call(model, tensors, (torch.ones(2, 4),)).sum().backward()

    def frozen_for_a_while(model):
        model.requires_grad_(False)
        model(torch.ones(2, 4))
        model.requires_grad_(True)

    def new_data(model):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()

    def under_no_sync(model):
        with model.no_sync():
            train_net(model)

    def as_a_copy(model):
        train_net(copy.deepcopy(model))
        train_net(pickle.loads(pickle.dumps(model)))

    def in_evaluation(model):
        with torch.no_grad():
            model.eval()(torch.ones(2, 4))
        model.train()

    def loaded_in_place_and_moved_to_the_same(model):
        model.load_state_dict(copied(model))
        model.float().to("cpu")

    def pruned(model):
        prune.l1_unstructured(model.module[0], "weight", 0.5)


@on_ranks(2)
def test_no_warning_if_nothing_is_lost(rank):
    for name in each([name for name in vars(Silent) if not name.startswith("_")]):
        model = torchddp.DDP(net())
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            getattr(Silent, name)(model)
            train_net(model, 10)

    # Parameters that are handled elsewhere.
    def parametrised():
        module = net()
        parametrizations.weight_norm(module[0])
        return torchddp.DDP(module)

    def left_out():
        module = net()
        torchddp.DDP._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
        model, bias = torchddp.DDP(module), module[0].bias
        module[0].load_state_dict(copy.deepcopy(module[0].state_dict()), assign=True)
        module[0].bias = bias
        return model

    def averaged_late():
        module = net()
        late = [("0.weight", module[0].weight)]
        return torchddp.DDP(module, delay_all_reduce_named_params=late, param_to_hook_all_reduce=module[2].weight)

    def in_parts():
        module = net()
        dist.fsdp.fully_shard(module[0])
        torchddp.DDP._set_params_and_buffers_to_ignore_for_model(module, ["0.weight", "0.bias"])
        return torchddp.DDP(module)

    class Weight(torch.Tensor):
        """A subclass, as libraries define them."""

    def of_a_subclass():
        module = net()
        module[0].weight = nn.Parameter(module[0].weight.detach().as_subclass(Weight))
        return torchddp.DDP(module)

    cast = {"mp_policy": dist.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    replicated = [lambda options=options: torchddp.replicate(net(), **options) for options in ({}, cast)]
    for make in (parametrised, left_out, averaged_late, in_parts, of_a_subclass, *replicated):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*changed after it was wrapped")
            train_net(make(), 5)
