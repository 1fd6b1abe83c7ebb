"""Two threads that run one model at once get an error; another thread may read a reducer's status."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torchddp
from tests.harness import future_of, on_ranks, over_both
from tests.models import Mlp, batch, seeded, step_on
from tests.unit.helpers import wait_until
from torchddp.transport import waits

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drawback")


class Paused(nn.Module):
    """Its backward pauses in the middle, in one thread."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.arrived, self.goes_on = threading.Event(), threading.Event()

    def pause(self, grad):
        self.arrived.set()
        assert self.goes_on.wait(60)

    def forward(self, x, pauses=False):
        inner = self.first(x)
        if pauses:
            inner.register_hook(self.pause)
        return self.last(inner).sum()


def beside(backward, module, during):
    """Call `during` while the backward in another thread pauses; the errors of both, if any."""
    errors = []

    def attempt(call):
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=attempt, args=[backward])
    thread.start()
    assert module.arrived.wait(60)
    attempt(during)
    module.goes_on.set()
    thread.join(60)
    assert not thread.is_alive()
    return errors


@over_both
@on_ranks(2)
def test_two_threads_in_one_backward(rank, ddp_class, transport):
    model = ddp_class(Paused(), transport=transport)
    losses = [model(torch.ones(1, 3), pauses) for pauses in (True, False)]
    errors = beside(losses[0].backward, model.module, losses[1].backward)
    assert any("mark a variable ready only once" in text for text in errors), errors


@over_both
@on_ranks(2)
def test_a_forward_during_a_backward(rank, ddp_class, transport):
    model = ddp_class(Paused(), transport=transport)
    loss = model(torch.ones(1, 3), True)
    errors = beside(loss.backward, model.module, lambda: model(torch.ones(1, 3)))
    assert len(errors) == 1 and "Expected to have finished reduction" in errors[0], errors


class Branching(Mlp):
    """An Mlp that can raise between its layers in backward, or skip one."""

    message = ""
    leaves_out = False

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = torch.cat([x, x[:, :8]], 1) if self.leaves_out else torch.tanh(self.middle(x))
        if self.message:
            x.register_hook(mock.Mock(side_effect=ValueError(self.message)))
        return self.last(x)


@on_ranks(1)
def test_other_threads_run_while_an_error_handler_waits_to_find_dead_peers():
    reducer = torchddp.DDP(seeded(Mlp), transport="c10d").reducer
    here = waits.process_identity()
    reducer.set_peers([(1, here["pid"], here["started"])])  # it stays alive, so the handler waits for the full time
    turns, over = [], threading.Event()

    def count():
        while not over.wait(0.001):
            turns.append(0)

    def turns_meanwhile():
        before = len(turns)
        assert reducer.with_failure_note("text") == "text"
        return len(turns) - before  # in 300 ms; if the handler held the GIL, one or two

    with ThreadPoolExecutor() as pool:
        pool.submit(count)
        assert wait_until(lambda: turns_meanwhile() >= 5)
        over.set()


@on_ranks(2)
def test_while_buckets_are_rebuilt_and_models_are_freed(rank):
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        ddp = torchddp.DDP(seeded(Mlp), bucket_cap_mb=0.001, **options)
        seen, over = [], threading.Event()

        def poll(reducer=ddp.reducer, seen=seen, over=over):
            while not over.wait(0.002):
                seen.append(reducer.status())

        with ThreadPoolExecutor() as pool:
            pool.submit(poll)
            for step in range(30):
                step_on(ddp, rank, step)
                assert wait_until(lambda: len(seen) > step)  # noqa: B023
                if step % 5 == 0 and not ddp.static_graph:
                    ddp.reducer.reset_state()
                    ddp._has_rebuilt_buckets = False
            over.set()
        assert not any(s["error"] for s in seen)
        assert seen[-1]["step"] <= 30
        idle = ddp.reducer.status()
        assert (idle["phase"], idle["step"], idle["bucket"], idle["armed"]) == ("idle", 30, -1, False)
        assert {bucket["state"] for bucket in idle["buckets"]} == {"reduced"}
        ddp.reducer.note_failure("is forgotten")
        step_on(ddp, rank, 99)
        assert ddp.reducer.with_failure_note("text") == "text"
        dist.barrier()  # a finished rank would add another note


@on_ranks(1)
def test_a_step_that_fails_while_a_bucket_is_launched(rank):
    """As with hooks on two devices: a bucket launched after the other's failure is not in flight."""
    ddp = torchddp.DDP(Mlp(), bucket_cap_mb=0.0001)
    launched, go_on = threading.Event(), threading.Event()

    def hook(state, bucket):
        launched.set()
        assert go_on.wait(60.0)
        return future_of(bucket.buffer())

    ddp.register_comm_hook(None, hook)
    ddp(batch(rank))
    last = len(ddp.session.specs) - 1  # its own bucket, and the first
    assert ddp.reducer.plan.buckets[0].params == [last]
    parameters = list(ddp.parameters())
    parameters[last].grad = torch.zeros_like(parameters[last])
    parameters[0].grad = torch.zeros_like(parameters[0]).to_sparse()
    with ThreadPoolExecutor() as pool:
        launches = pool.submit(ddp.reducer._autograd_hook, last)
        assert launched.wait(60.0)
        gives_up = pool.submit(ddp.reducer._autograd_hook, 0)
        wait([gives_up], 0.5)  # it may wait for the launch
        go_on.set()
        launches.result(60.0)
        with pytest.raises(RuntimeError, match="got a Sparse gradient"):
            gives_up.result(60.0)
    status = ddp.reducer.status()
    assert {bucket["state"] for bucket in status["buckets"]} == {"idle"} and not status["armed"]
    # The next step works.
    ddp.zero_grad()
    step_on(ddp, rank)
