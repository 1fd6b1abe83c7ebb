"""Traps: each is told of once, with its line, by one rank; programs that are right hear nothing."""

import copy
import gc
import os
import sys
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import torchddp
import torchddp.diagnose.traps
import torchddp.optim
import torchddp.sync
from tests.harness import on_ranks, run_ranks
from tests.models import Branches, Mlp, NormNet, batch, loss_of, seeded
from torchddp.diagnose.changed_gradients import next_look
from torchddp.diagnose.needless_search import LOOKED_AT

pytestmark = pytest.mark.beyond_torch("tells of no traps")
TRANSPORTS = ["shm", "c10d"]


class Heard:
    """The UsageWarnings of the block, as (text, line)."""

    def __enter__(self):
        self._catcher = warnings.catch_warnings(record=True)
        self._caught = self._catcher.__enter__()
        warnings.simplefilter("always")
        return self

    def __exit__(self, *error):
        self._catcher.__exit__(*error)

    @property
    def told(self):
        found = [w for w in self._caught if issubclass(w.category, torchddp.UsageWarning)]
        assert all(w.filename == __file__ for w in found), [w.filename for w in found]
        return [(str(w.message), w.lineno) for w in found]


def line():
    """Of the caller."""
    return sys._getframe(1).f_lineno


def made(transport="auto", make=Mlp, **options):
    ddp = torchddp.DDP(seeded(make), transport=transport, bucket_cap_mb=0.001, **options)
    return ddp, torch.optim.SGD(ddp.parameters(), 0.01)


def train(ddp, optimizer, rank, steps=1):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(ddp(batch(rank, step))).backward()
        optimizer.step()


def heard_by(work, world_size, *args):
    """By rank, what was told; then all of it."""
    by_rank = run_ranks(work, world_size, *args)
    return by_rank, [one for told in by_rank for one in told]


def only_one(work, world_size, *args):
    by_rank, told = heard_by(work, world_size, *args)
    assert len(told) == 1, by_rank
    return told[0]


# --- no_sync() around one of forward and backward


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_sync_around_backward_alone(world_size, transport):
    def work(rank):
        ddp, optimizer = made(transport if world_size > 1 else "auto")
        with Heard() as heard:
            for step in range(3):
                optimizer.zero_grad()
                loss = loss_of(ddp(batch(rank, step)))
                here = line() - 1
                with ddp.no_sync():
                    loss.backward()
                optimizer.step()
        assert all(f"test_traps.py:{here}, outside" in text and at == here + 2 for text, at in heard.told)
        return heard.told

    text, _ = only_one(work, world_size)
    assert "averaged inside no_sync()" in text and "put its forward inside too" in text


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_sync_around_forward_alone(world_size, transport):
    def work(rank):
        ddp, optimizer = made(transport if world_size > 1 else "auto")
        with Heard() as heard:
            for step in range(3):
                optimizer.zero_grad()
                with ddp.no_sync():
                    loss = loss_of(ddp(batch(rank, step)))
                    here = line() - 1
                loss.backward()
                optimizer.step()
        assert all(at == here for _, at in heard.told)
        return heard.told

    text, here = only_one(work, world_size)
    assert "gradients that were not averaged" in text and f"test_traps.py:{here} was inside no_sync()" in text
    assert "put the forward outside too" in text


def test_forwards_alone_under_no_sync_are_right_if_their_gradients_are_averaged_later():
    """A backward through all microbatches at once, and one after the other with the last synchronised."""

    def work(rank):
        ddp, optimizer = made()
        with Heard() as heard:
            for step in range(3):
                optimizer.zero_grad()
                with ddp.no_sync():
                    losses = [loss_of(ddp(batch(rank, 10 * step + i))) for i in range(2)]
                (sum(losses) + loss_of(ddp(batch(rank, 10 * step + 3)))).backward()
                optimizer.step()
                optimizer.zero_grad()
                with ddp.no_sync():
                    loss = loss_of(ddp(batch(rank, step)))
                loss.backward()
                loss_of(ddp(batch(rank, step + 1))).backward()
                optimizer.step()
        return heard.told

    assert heard_by(work, 2)[1] == []


# --- a forward without a backward


def throw_away_at_once(ddp, rank):
    ddp(batch(rank))
    return line() - 1


def skip_the_batch(ddp, rank):
    for step in range(3):
        loss = loss_of(ddp(batch(rank, step)))
        here = line() - 1
        if step == 0:
            continue
        loss.backward()
    return here


def catch_the_exception(ddp, rank):
    for step in range(3):
        try:
            output = ddp(batch(rank, step))
            here = line() - 1
            if step == 0:
                raise ValueError("a bad batch")
            loss_of(output).backward()
        except ValueError:
            continue
    return here


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("leave", [throw_away_at_once, skip_the_batch, catch_the_exception])
def test_a_forward_that_is_left(leave, world_size, transport):
    def work(rank):
        ddp, optimizer = made(transport if world_size > 1 else "auto")
        with Heard() as heard:
            train(ddp, optimizer, rank, 2)
            here = leave(ddp, rank)
            train(ddp, optimizer, rank, 2)
            leave(ddp, rank)
            train(ddp, optimizer, rank, 2)
        assert all(at == here and f"test_traps.py:{here} " in text for text, at in heard.told)
        return heard.told

    text, _ = only_one(work, world_size)
    assert "No backward has followed the forward" in text and "torch.no_grad()" in text


def test_the_rank_on_which_it_happens_tells():
    """Rank 1 leaves one out that it makes up for, so that nobody waits."""

    def work(rank):
        ddp, optimizer = made(forward_sync_buffers=False)
        with Heard() as heard:
            train(ddp, optimizer, rank)
            if rank == 1:
                ddp(batch(rank))
            train(ddp, optimizer, rank, 2)
        return heard.told

    by_rank, told = heard_by(work, 2)
    assert len(told) == 1 and by_rank[0] == [] and "on rank 1" in told[0][0]


# --- gradients that ranks treat differently


def clip(parameters):
    torch.nn.utils.clip_grad_norm_(parameters, 0.1)


def drop_one(parameters):
    parameters[0].grad = None


def double(parameters):
    parameters[0].grad *= 2


def double_data(parameters):
    parameters[0].grad.data.mul_(2)


def replace(parameters):
    parameters[0].grad = parameters[0].grad * 2


WORDS = {
    clip: "changed",
    drop_one: "set to None",
    double: "changed",
    double_data: "changed",
    replace: "replaced by another tensor",
}


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": False}, {"gradient_as_bucket_view": True}], ids=str
)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("change", WORDS)
def test_gradients_changed_on_one_rank(change, transport, options):
    def work(rank):
        ddp, optimizer = made(transport, **options)
        with Heard() as heard:
            for step in range(4):
                optimizer.zero_grad()
                loss_of(ddp(batch(rank, step))).backward()
                if rank == 1:
                    change(list(ddp.parameters()))
                optimizer.step()
                here = line() - 1
        assert all(at == here for _, at in heard.told)
        return heard.told

    by_rank, told = heard_by(work, 3)
    assert len(told) == 1 and len(by_rank[0]) == 1, by_rank
    assert f"'first.weight' was {WORDS[change]} on rank 1; left as backward gave it on ranks 0 and 2" in told[0][0]
    assert ("also differ on 'first.bias', 'middle.weight' and 2 more" in told[0][0]) == (change is clip)


def test_a_later_step_is_found_at_the_next_that_is_looked_at():
    """They are few: 1, 2, 3, 4, 8, 16, ..."""
    assert [next_look(step) for step in (0, 1, 2, 3, 4, 7, 8, 9, 16)] == [1, 2, 3, 4, 8, 8, 16, 16, 32]

    def work(rank):
        ddp, optimizer = made()
        with Heard() as heard:
            for step in range(1, 12):
                optimizer.zero_grad()
                loss_of(ddp(batch(rank, step))).backward()
                if rank == 0 and step >= 5:
                    clip(ddp.parameters())
                optimizer.step()
        return heard.told

    assert "(synchronised step 8)" in only_one(work, 2)[0]


@pytest.mark.parametrize("change", WORDS)
def test_gradients_changed_on_all_ranks_are_right(change):
    def work(rank):
        ddp, optimizer = made()
        with Heard() as heard:
            for step in range(10):
                optimizer.zero_grad()
                loss_of(ddp(batch(rank, step))).backward()
                change(list(ddp.parameters()))
                optimizer.step()
        return heard.told

    assert heard_by(work, 2)[1] == []


def test_looking_at_gradients_leaves_no_hook_behind():
    def work(rank):
        hooks = _global_optimizer_pre_hooks
        ddp, optimizer = made()
        counts = []
        for _ in range(7):
            train(ddp, optimizer, rank)
            counts.append(len(hooks))
        ddp.observers.close()
        return counts, len(hooks)

    for counts, left in run_ranks(work, 2):
        assert counts[:4] == [1] * 4 and counts[5:] == [0, 0] and left == 0, counts


@on_ranks(2)
def test_nothing_is_sent_in_steps_that_are_not_looked_at(rank, monkeypatch):
    calls = []
    traps = torchddp.diagnose.traps
    for name in ("post", "read", "add", "claim", "forget"):
        method = getattr(traps.Board, name)
        monkeypatch.setattr(
            traps.Board, name, lambda self, *args, method=method: (calls.append(args[0]), method(self, *args))[1]
        )
    ddp, optimizer = made(stall_report_s=0, find_unused_parameters=True)
    train(ddp, optimizer, rank, 17)
    sent = len(calls)
    assert sent > 0
    train(ddp, optimizer, rank, 14)  # up to step 31
    assert len(calls) == sent, calls[sent:]
    train(ddp, optimizer, rank, 1)
    assert len(calls) > sent


@on_ranks(2)
def test_looking_keeps_no_model(rank):
    ddp, optimizer = made()
    train(ddp, optimizer, rank, 2)
    gone = weakref.ref(ddp)
    del ddp, optimizer
    gc.collect()
    assert gone() is None


# --- find_unused_parameters


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_needless_search(world_size, transport):
    def work(rank):
        ddp, optimizer = made(transport if world_size > 1 else "auto", find_unused_parameters=True)
        with Heard() as heard:
            train(ddp, optimizer, rank, LOOKED_AT)
            assert heard.told == []
            train(ddp, optimizer, rank, 5)
        return heard.told

    by_rank, told = heard_by(work, world_size)
    assert len(told) == 1 and len(by_rank[0]) == 1
    assert f"first {LOOKED_AT} synchronised steps. Leave out find_unused_parameters=True" in told[0][0]


@pytest.mark.parametrize("unused_on", ["all", "rank 1", "step 7"])
def test_a_search_that_is_needed(unused_on):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.extra = nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8, dtype=torch.float64)

        def forward(self, x, with_extra):
            return self.extra(self.body(x)) if with_extra else self.body(x)

    def work(rank):
        ddp, optimizer = made(make=Head, find_unused_parameters=True)
        with Heard() as heard:
            for step in range(LOOKED_AT + 5):
                optimizer.zero_grad()
                left_out = {"all": True, "rank 1": rank == 1, "step 7": step == 7}[unused_on]
                loss_of(ddp(batch(rank, step), not left_out)).backward()
                optimizer.step()
        return heard.told

    assert heard_by(work, 2)[1] == []


def test_no_search_where_it_is_needed():
    """The error tells the flag, and the parameters by name."""

    def work(rank):
        ddp = torchddp.DDP(seeded(Branches))
        loss_of(ddp(batch(rank, 0, 3, 4), "left")).backward()
        with pytest.raises(RuntimeError) as error:
            ddp(batch(rank, 1, 3, 4), "left")
        return str(error.value)

    for rank, text in enumerate(run_ranks(work, 2)):
        assert "wrap the model with find_unused_parameters=True" in text
        assert f"for rank {rank}: right.weight, right.bias, never.weight, never.bias\n" in text


def test_a_parameter_in_two_reentrant_checkpoints():
    """The error tells which, and what to pass."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))

        def forward(self, x):
            x = self.first(x)
            return checkpoint(self.layer, checkpoint(self.layer, x, use_reentrant=True), use_reentrant=True)

    def work(rank):
        ddp = torchddp.DDP(seeded(Twice))
        with pytest.raises(RuntimeError) as error:
            loss_of(ddp(batch(rank))).backward()
        return str(error.value)

    for text in run_ranks(work, 2):
        assert "parameter 'layer." in text and "pass use_reentrant=False to torch.utils.checkpoint" in text
        assert "static_graph=True to DistributedDataParallel" in text


# --- programs that are right


def plain(ddp, optimizer, rank):
    train(ddp, optimizer, rank, 6)


def accumulation(ddp, optimizer, rank):
    for step in range(4):
        optimizer.zero_grad()
        with ddp.no_sync():
            for i in range(2):
                loss_of(ddp(batch(rank, 10 * step + i))).backward()
        loss_of(ddp(batch(rank, 10 * step + 3))).backward()
        optimizer.step()


def accumulation_in_the_loop(ddp, optimizer, rank):
    for strategy in ("single_auto_sync", "multi_auto_sync", "forced_sync"):
        for _ in range(2):
            optimizer.zero_grad()
            for i in torchddp.sync.accumulate(ddp, 3, strategy):
                (loss_of(ddp(batch(rank, i))) / 3).backward()
            optimizer.step()


def local_steps(ddp, optimizer, rank):
    with ddp.no_sync():
        train(ddp, optimizer, rank, 4)
    train(ddp, optimizer, rank, 2)


def evaluation_with_a_graph(ddp, optimizer, rank):
    for _ in range(3):
        train(ddp, optimizer, rank, 2)
        ddp.eval()
        for step in range(3):
            loss_of(ddp(batch(rank, step))).item()
        ddp.train()


def evaluation_on_rank_0(ddp, optimizer, rank):
    for _ in range(3):
        train(ddp, optimizer, rank, 2)
        if rank == 0:
            ddp.eval()
            loss_of(ddp.module(batch(rank))).item()
            with torch.no_grad():
                ddp.module(batch(rank))
            ddp.train()


def two_forwards(ddp, optimizer, rank):
    for step in range(4):
        optimizer.zero_grad()
        first, second = ddp(batch(rank, step)), ddp(batch(rank, step + 1))
        (loss_of(first) + loss_of(second)).backward()
        optimizer.step()


def gan(ddp, optimizer, rank):
    """As the usual loops: the discriminator on real and fake, the generator through it."""
    generator, other = made()
    for step in range(4):
        fake = generator(batch(rank, step))
        optimizer.zero_grad()
        real_loss = loss_of(ddp(batch(rank, step + 50)))
        fake_loss = loss_of(ddp(fake.detach()))
        (real_loss - fake_loss).backward()
        optimizer.step()
        other.zero_grad()
        loss_of(ddp(fake)).backward()
        other.step()


def gan_whose_discriminator_is_not_reduced_for_the_generator(ddp, optimizer, rank):
    generator, other = made()
    for step in range(4):
        other.zero_grad()
        with ddp.no_sync():
            loss_of(ddp(generator(batch(rank, step)))).backward()
        other.step()
        train(ddp, optimizer, rank)


def gradient_penalty(ddp, optimizer, rank):
    for step in range(4):
        optimizer.zero_grad()
        x = batch(rank, step).requires_grad_()
        output = ddp(x)
        (slope,) = torch.autograd.grad(loss_of(output), x, create_graph=True)
        (loss_of(output) + loss_of(slope)).backward()
        optimizer.step()


def adversarial_inputs(ddp, optimizer, rank):
    """The first forward is for the gradient of the inputs alone."""
    for step in range(4):
        optimizer.zero_grad()
        x = batch(rank, step).requires_grad_()
        (slope,) = torch.autograd.grad(loss_of(ddp(x)), x)
        loss_of(ddp((x + 0.1 * slope.sign()).detach())).backward()
        optimizer.step()


def closures(ddp, optimizer, rank):
    """As Lightning calls the optimizer."""
    for step in range(10):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(ddp(batch(rank, step)))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            return loss

        optimizer.step(closure)


def lbfgs(ddp, optimizer, rank):
    closures(ddp, torch.optim.LBFGS(ddp.parameters(), max_iter=3), rank)


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
    for step in range(6):
        optimizer.zero_grad()
        loss_of(ddp(batch(rank, step))).backward()
        if rank == 0:
            [(p.grad.norm().item(), p.grad.clone(), p.grad.data.abs().max()) for p in ddp.parameters()]
        optimizer.step()


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
    outer = torchddp.DDP(copy.deepcopy(ddp.module))
    train(torch.compile(outer, backend="eager"), torch.optim.SGD(outer.parameters(), 0.01), rank, 6)


def compiled_inside(ddp, optimizer, rank):
    inside = torchddp.DDP(torch.compile(copy.deepcopy(ddp.module), backend="eager"))
    train(inside, torch.optim.SGD(inside.parameters(), 0.01), rank, 6)


def compiled_optimizer(ddp, optimizer, rank):
    step = torch.compile(optimizer.step, backend="eager")
    for i in range(6):
        optimizer.zero_grad()
        loss_of(ddp(batch(rank, i))).backward()
        step()


def in_functions(ddp, optimizer, rank):
    """Outputs and losses die as soon as they can."""

    def loss(step):
        return loss_of(ddp(batch(rank, step)))

    for step in range(6):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()


def retained_graph(ddp, optimizer, rank):
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(ddp(batch(rank, step)))
        loss.backward(retain_graph=True)
        optimizer.step()
        del loss


def sharded_optimizer(ddp, optimizer, rank):
    train(ddp, torchddp.optim.OSS(ddp.parameters(), torch.optim.SGD, lr=0.01), rank, 6)


def torchs_sharded_optimizer(ddp, optimizer, rank):
    train(ddp, ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.01), rank, 6)


def optimizers_in_hooks(ddp, optimizer, rank):
    """One a parameter, each of which steps while backward still runs."""
    optimizers = {p: torch.optim.SGD([p], 0.01) for p in ddp.module.last.parameters()}

    def step(parameter):
        optimizers[parameter].step()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    train(ddp, torch.optim.SGD(ddp.module.first.parameters(), 0.01), rank, 6)


RIGHT = [
    plain,
    accumulation,
    accumulation_in_the_loop,
    local_steps,
    evaluation_with_a_graph,
    evaluation_on_rank_0,
    two_forwards,
    gan,
    gan_whose_discriminator_is_not_reduced_for_the_generator,
    gradient_penalty,
    adversarial_inputs,
    closures,
    lbfgs,
    two_optimizers,
    scaler,
    logging_on_rank_0,
    zeroed_in_place,
    uneven_inputs,
    compiled,
    compiled_inside,
    compiled_optimizer,
    in_functions,
    retained_graph,
    sharded_optimizer,
    torchs_sharded_optimizer,
    optimizers_in_hooks,
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("program", RIGHT)
def test_programs_that_are_right_hear_nothing(program, transport):
    def work(rank):
        ddp, optimizer = made(transport)
        with Heard() as heard:
            program(ddp, optimizer, rank)
        return heard.told

    assert heard_by(work, 2)[1] == []


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_checkpoints_hear_nothing(whole, reentrant):
    class Checkpointed(Mlp):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    def work(rank):
        ddp, optimizer = made(make=Mlp if whole else Checkpointed)
        with Heard() as heard:
            for step in range(6):
                optimizer.zero_grad()
                x = batch(rank, step).requires_grad_()
                loss_of(checkpoint(ddp, x, use_reentrant=reentrant) if whole else ddp(x)).backward()
                optimizer.step()
        return heard.told

    assert heard_by(work, 2)[1] == []


def test_sharded_and_replicated_models_hear_nothing():
    def work(rank):
        with Heard() as heard:
            optimizer = torchddp.optim.OSS(seeded(Mlp).parameters(), torch.optim.SGD, lr=0.01)
            module = seeded(Mlp)
            optimizer = torchddp.optim.OSS(module.parameters(), torch.optim.SGD, lr=0.01)
            train(torchddp.ShardedDataParallel(module, optimizer), optimizer, rank, 6)
            replicated = torchddp.replicate(seeded(Mlp))
            train(replicated, torch.optim.SGD(replicated.parameters(), 0.01), rank, 6)
        return heard.told

    assert heard_by(work, 2)[1] == []


def test_another_process_group_goes_on_looking():
    def work(rank):
        ddp, optimizer = made()
        train(ddp, optimizer, rank, 5)
        ddp._update_process_group(dist.new_group([0, 1]))
        with Heard() as heard:
            for step in range(4):
                optimizer.zero_grad()
                loss_of(ddp(batch(rank, step))).backward()
                if rank == 1:
                    clip(ddp.parameters())
                optimizer.step()
        return heard.told

    assert "(synchronised step 1)" in only_one(work, 2)[0]


def test_warnings_are_switched_off_by_their_category():
    def work(rank):
        ddp, optimizer = made()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore", torchddp.UsageWarning)
            ddp(batch(rank))
            train(ddp, optimizer, rank, 3)
        return [str(w.message) for w in caught]

    assert run_ranks(work, 2) == [[], []]


# --- batch norm: nothing to tell


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_forwards_with_batch_norm_before_one_backward(transport):
    """torch's class breaks: the broadcast of buffers changes what backward needs (pytorch#175024)."""

    def work(rank):
        ddp, optimizer = made(transport, make=NormNet)
        with Heard() as heard:
            for step in range(3):
                optimizer.zero_grad()
                outputs = [ddp(batch(rank, 10 * step + i, 4, 3, 6, 6)) for i in range(2)]
                sum(map(loss_of, outputs)).backward()
                optimizer.step()
        torchddp.check_parameters(ddp)
        return heard.told

    assert heard_by(work, 2)[1] == []


# --- threads


def test_threads_of_ranks_that_have_too_many(monkeypatch):
    def work(rank):
        torch.set_num_threads(2 * len(os.sched_getaffinity(0)))
        with Heard() as heard:
            for _ in range(2):
                ddp, optimizer = made()
                train(ddp, optimizer, rank, 3)
        return heard.told

    by_rank, told = heard_by(work, 2)
    assert len(told) == 1 and len(by_rank[0]) == 1, by_rank
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert told[0][0].startswith("The 2 ranks of this host have") and f"Set OMP_NUM_THREADS={share} " in told[0][0]
