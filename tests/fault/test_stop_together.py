"""torchddp.StopTogether: when one rank is asked to stop, all stop after the same step."""

import contextlib
import hashlib
import multiprocessing
import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import torchddp
from tests.harness import gathered, in_child, logged, on_ranks, over_both, run_outcomes, run_ranks
from tests.models import Mlp, batch, loss_of, seeded
from tests.unit.helpers import wait_until
from torchddp import notices
from torchddp.sync import stop_together as module

MOST_STEPS = 20_000  # far more than any test may need
LONG_S = 300.0


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr(module, "_LOOK_S", 0.02)


def made(**options):
    return torchddp.DistributedDataParallel(seeded(Mlp).float(), bucket_cap_mb=0.001, **options)


def step_of(model, optimizer, rank, step):
    optimizer.zero_grad()
    loss_of(model(batch(rank, step, dtype=torch.float32))).backward()
    optimizer.step()


def digest(model):
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def train(rank, model, stop, *, ask=lambda step: None, checks=1):
    """Steps until it stops; returns how many, and what the parameters are then."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(MOST_STEPS):
        step_of(model, optimizer, rank, step)
        ask(step)
        if any([bool(stop) for _ in range(checks)]):
            return step + 1, digest(model)
    raise AssertionError("nobody stopped")


def assert_equal_on_ranks(value):
    found = gathered(value)
    assert len(set(found)) == 1, found
    return found[0]


@pytest.mark.parametrize("how", ["SIGTERM", "request", "thread", "handler"])
@on_ranks(3)
def test_all_ranks_stop_after_the_same_step(rank, world_size, how):
    def ask(step):
        if rank != world_size - 1 or step != 7:
            return
        if how == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        elif how == "thread":
            threading.Thread(target=stop.request, args=("a thread",)).start()
        elif how == "handler":
            signal.signal(signal.SIGUSR2, lambda *_: stop.request("a handler"))
            os.kill(os.getpid(), signal.SIGUSR2)
        else:
            stop.request("enough")

    heard = []
    leave = notices.listen(heard.append)
    model = made()
    with torchddp.StopTogether(model) as stop:
        steps, _ = assert_equal_on_ranks(train(rank, model, stop, ask=ask, checks=1 + rank))
        assert stop and steps > 7
        reason = {"request": "enough", "thread": "a thread", "handler": "a handler"}.get(how, how)
        assert stop.reason == f"{reason} on rank {world_size - 1}"
    leave()
    assert [(n.kind, n.details["rank"]) for n in heard] == [("stop_request", world_size - 1)]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@on_ranks(2)
def test_between_microbatches_it_waits_for_the_step(rank):
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    answers = []
    with torchddp.StopTogether(model) as stop:
        for microbatch in range(MOST_STEPS):
            last = microbatch % 4 == 3
            with contextlib.nullcontext() if last else model.no_sync():
                loss_of(model(batch(rank, microbatch, dtype=torch.float32))).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            if rank == 0 and microbatch == 5:
                stop.request()
            answers.append(bool(stop))
            time.sleep(0.003 * rank)  # the ranks are apart here
            if answers[-1]:
                break
    assert_equal_on_ranks(len(answers))
    assert len(answers) % 4 == 0  # after a whole step


@on_ranks(3)
def test_join_static_graph_unused_parameters_and_several_models(rank):
    first, second = made(find_unused_parameters=True), made(static_graph=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (first, second)]
    steps = 5 + 4 * rank
    with torchddp.StopTogether(first, second) as stop:
        with first.join():
            for step in range(steps):
                step_of(first, optimizers[0], rank, step)
                assert not stop
        if rank == 0:
            stop.request()
        wait_until(lambda: stop.reason is not None)
        done = 0
        for step in range(MOST_STEPS):
            step_of(second, optimizers[1], rank, step)
            done += 1
            if stop:
                break
    assert assert_equal_on_ranks(done) <= 2


@on_ranks(2)
def test_sharded_replicated_and_hooked_models(rank):
    module_ = torchddp.replicate(seeded(Mlp).float())
    sharded_model = seeded(Mlp).float()
    optimizer = torchddp.optim.OSS(sharded_model.parameters(), torch.optim.SGD, lr=0.01)
    sharded = torchddp.ShardedDataParallel(sharded_model, optimizer)
    hooked = made()
    hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for model in (module_, sharded, hooked):
        own = optimizer if model is sharded else torch.optim.SGD(model.parameters(), lr=0.01)
        with torchddp.StopTogether(model) as stop:
            for step in range(MOST_STEPS):
                step_of(model, own, rank, step)
                if rank == 1 and step == 3:
                    stop.request()
                if stop:
                    break
        assert assert_equal_on_ranks(step) >= 3


@on_ranks(2)
def test_without_a_model_checks_count(rank):
    with torchddp.StopTogether() as stop:
        for count in range(MOST_STEPS):
            dist.barrier()
            if rank == 1 and count == 4:
                stop.request()
            if stop:
                break
        assert assert_equal_on_ranks(count) >= 4


@on_ranks(3)
def test_before_the_first_step_nobody_begins_one(rank):
    model = made()
    with torchddp.StopTogether(model) as stop:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: stop.reason is not None)
        assert stop
        assert model.reducer.finished_steps == 0


@pytest.mark.parametrize("leaver", [0, 1])
@on_ranks(2)
def test_a_rank_that_has_left_keeps_nobody_waiting(rank, leaver):
    """The loop is over: the request comes too late for a common step, and all answers are no."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stop = torchddp.StopTogether(model)
    for step in range(3):
        step_of(model, optimizer, rank, step)
        assert step == 2 or not stop
    if rank == leaver:
        assert not stop
        stop.close()
    dist.barrier()
    if rank != leaver:
        stop.request()
        wait_until(lambda: stop.reason is not None)
        assert not stop
        stop.close()
    assert_equal_on_ranks(stop.reason is None or rank != leaver)


def outlived(rank):
    """Rank 2 dies between steps; the request reaches the others, which save and leave."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with torchddp.StopTogether(model) as stop:
        step_of(model, optimizer, rank, 0)
        assert not stop
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        stop.request()
        wait_until(lambda: stop.reason is not None)
        began_s = time.monotonic()
        assert not stop  # the same position as before
        assert time.monotonic() - began_s < LONG_S / 2


def left_behind(rank, how):
    """Rank 0 asks for a stop, publishes its position, and is gone before the other's watcher has looked."""
    module._LOOK_S = 1.0 if rank == 1 else 0.02
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with torchddp.StopTogether(torch.compile(model, backend="eager")) as stop:
        step_of(model, optimizer, rank, 0)
        assert not stop
        dist.barrier()
        if rank == 0:
            stop.request()
            wait_until(lambda: stop._published)
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            return
        wait_until(lambda: stop.reason is not None)
        began_s = time.monotonic()
        assert not stop
        assert time.monotonic() - began_s < LONG_S / 2


@pytest.mark.parametrize("how", ["leaves", "dies"])
def test_a_rank_that_leaves_before_the_last_step_is_known_keeps_nobody_waiting(how):
    ends = run_outcomes(left_behind, 2, how, needed_ranks=[1])
    assert ends[1].ok, ends


def test_a_dead_rank_keeps_nobody_waiting():
    ends = run_outcomes(outlived, 3, needed_ranks=[0, 1])
    assert ends[0].ok and ends[1].ok, ends


def test_one_rank_alone_stops():
    def work(rank):
        model = made()
        with torchddp.StopTogether(model) as stop:
            steps, _ = train(rank, model, stop, ask=lambda step: step == 3 and stop.request())
            assert steps >= 4

    run_ranks(work, 1)


def kept_waiting(rank, how):
    """A rank that gets no further than its first step."""
    model = made()
    grace_s = 0.5 if how == "grace" else LONG_S
    with torchddp.StopTogether(model, grace_s=grace_s) as stop:
        assert not stop
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            if how == "second":
                time.sleep(2.1)
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(LONG_S)
        else:
            with pytest.raises(torchddp.TransportError):
                step_of(model, torch.optim.SGD(model.parameters(), lr=0.01), rank, 0)


@pytest.mark.parametrize("how", ["second", "grace"])
def test_a_second_signal_or_the_grace_ends_the_rank(how):
    ends = run_outcomes(kept_waiting, 2, how)
    assert ends[0].exit_code == -signal.SIGTERM and ends[1].ok, ends


@on_ranks(2)
def test_after_the_grace_an_unsignalled_rank_goes_on(rank):
    messages = logged()
    with torchddp.StopTogether(grace_s=0.1, signals=()) as stop:
        assert not stop
        if rank == 0:
            stop.request("never mind")
        wait_until(lambda: stop.reason is not None)
        time.sleep(0.5)
        assert not stop
    assert len(messages) == 1, messages
    assert "not agree on a last step with the others within 0.1 s" in messages[0] and messages[0].endswith("goes on")


def feed():
    """Batches of two worker processes, as torch starts them in a rank that is no daemon."""
    multiprocessing.process.current_process()._config["daemon"] = False
    data = torch.utils.data.TensorDataset(torch.randn(MOST_STEPS, 8))
    return torch.utils.data.DataLoader(data, batch_size=4, num_workers=2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@on_ranks(2)
def test_workers_of_a_dataloader_outlive_a_signal_to_all_processes(rank, number):
    """As torchrun and Slurm send it."""
    os.setpgid(0, 0)
    others = gathered(os.getpid())
    model = torchddp.DistributedDataParallel(torch.nn.Linear(8, 1))
    with torchddp.StopTogether(model) as stop:
        for step, (x,) in enumerate(feed()):
            model(x).sum().backward()
            if rank == 0 and step == 5:
                os.killpg(others[1], number)
            if stop:
                break
    assert assert_equal_on_ranks(step) >= 5
    assert stop.reason == f"{number.name} on rank 1"


def test_a_child_can_stop_by_itself():
    def work(rank):
        with torchddp.StopTogether(signals=[signal.SIGTERM]):

            def body():
                with torchddp.StopTogether(signals=[signal.SIGTERM], process_group=None) as stop:
                    os.kill(os.getpid(), signal.SIGTERM)
                    wait_until(lambda: stop.reason is not None)
                    assert stop

            assert in_child(body)

    run_ranks(work, 1)


@on_ranks(2)
def test_a_signal_after_the_last_check_is_a_request_to_the_next(rank):
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with torchddp.StopTogether(model) as stop:
        step_of(model, optimizer, rank, 0)
        assert not stop
        if rank == 1:  # in the validation after an epoch
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: stop.reason is not None)
    with torchddp.StopTogether(model) as stop:
        assert_equal_on_ranks(train(rank, model, stop))
        assert stop.reason == "SIGTERM on rank 1"
    with torchddp.StopTogether(model) as stop:  # that was heeded
        step_of(model, optimizer, rank, 1)
        time.sleep(0.2)
        assert stop.reason is None and not stop


@on_ranks(1)
def test_wrong_arguments_are_refused(rank):
    with pytest.raises(TypeError, match=r"needs models of torchddp .*got torch\.nn\.modules\.linear\.Linear"):
        torchddp.StopTogether(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="needs models of torchddp .*got str"):
        torchddp.StopTogether("model")
    for signals in (signal.SIGTERM, ["SIGTERM"]):
        with pytest.raises(
            TypeError, match=r"signals must be a list, such as \[signal.SIGTERM\], or \(\) for none; got"
        ):
            torchddp.StopTogether(signals=signals)
    with pytest.raises(TypeError, match="grace_s must be a number of seconds"):
        torchddp.StopTogether(grace_s="1")
    with pytest.raises(ValueError, match="grace_s"):
        torchddp.StopTogether(grace_s=-1)
    with pytest.raises(ValueError, match="signal 9 can't be caught"):
        torchddp.StopTogether(signals=[signal.SIGKILL])
    with torchddp.StopTogether(), pytest.raises(RuntimeError, match="already catches signals"):
        torchddp.StopTogether()
    torchddp.StopTogether().close()


def trials(rank, transport, count, seed):
    """Random ranks are asked to stop at random moments, again and again."""
    world_size = dist.get_world_size()
    model = made(transport=transport)
    chance, own = random.Random(seed), random.Random(seed + rank)
    found = []
    for _ in range(count):
        askers = {chance.randrange(world_size) for _ in range(1 + chance.randrange(2))}
        number = chance.choice([signal.SIGTERM, signal.SIGUSR1])
        delay_s = chance.random() * 0.05
        with torchddp.StopTogether(model) as stop:
            timer = threading.Timer(delay_s, os.kill, (os.getpid(), number))
            if rank in askers:
                timer.start()

            def dawdle(step):
                if own.random() < 0.1:
                    time.sleep(own.random() * 0.005)

            found.append(train(rank, model, stop, ask=dawdle))
            timer.join() if rank in askers else None
            time.sleep(0.001)
        dist.barrier()
    return found


MANY = [pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 220, 1), (4, 150, 1), (8, 130, 1), (16, 20, 1))]


@pytest.mark.rest_is_thorough("*-8-17-*", "2-220-1-shm", "4-150-1-c10d", "8-130-1-shm")
@over_both
@pytest.mark.parametrize(("world_size", "count", "seed"), [(2, 8, 17), (4, 8, 17), *MANY])
def test_random_signals(transport, world_size, count, seed):
    found = run_ranks(trials, world_size, transport, count, seed, timeout=900.0)
    assert all(other == found[0] for other in found) and len(found[0]) == count
