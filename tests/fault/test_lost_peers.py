"""A rank dies or stalls mid-step: the others raise, naming rank, bucket and parameters, and never hang."""

import contextlib
import os
import re
import resource
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import torchddp
from tests.fault.test_shm_faults import error_of
from tests.harness import GROUP_TIMEOUT_S, gathered, run_ranks
from tests.models import Mlp, batch, loss_of, seeded, step_on
from torchddp.diagnose.monitor import _monitors
from torchddp.transport.waits import GONE, look_up, process_identity

LIMIT_S = 8.0  # timeout of the group, in tests that wait for it; a rank that runs comes in time
FAULT_STEP = 2

pytestmark = pytest.mark.beyond_torch("names neither the bucket nor its parameters")


class Fragile(Mlp):
    """An Mlp that sends a signal to its own process halfway through backward."""

    signal_number = 0

    def forward(self, x):
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x.to(self.first.weight.dtype)))))
        if self.signal_number:
            hidden.register_hook(lambda grad: os.kill(os.getpid(), self.signal_number))
        return self.last(hidden)


def _train_until_fault(rank, ddp_class, number, options):
    model = seeded(Fragile)
    ddp = ddp_class(model.float() if "comm_hook" in options else model, bucket_cap_mb=0.001, **options)
    for step in range(FAULT_STEP):
        ddp.zero_grad()
        step_on(ddp, rank, step)
    # The ranks' processes are looked up soon after the start; on a busy machine, the steps may be faster.
    while not all(monitor._knows_all for monitor in _monitors.values()):
        time.sleep(0.01)
    dist.barrier()
    if rank == 1:
        ddp.module.signal_number = number
    # An asynchronous transport may detect the fault one step later.
    return error_of(lambda: [step_on(ddp, rank, FAULT_STEP + step) for step in range(3)])


def _survivors(ddp_class, number, world_size, options, group_timeout_s=GROUP_TIMEOUT_S):
    needed = [rank for rank in range(world_size) if rank != 1]
    found = run_ranks(
        _train_until_fault, world_size, ddp_class, number, options,
        group_timeout_s=group_timeout_s, needed_ranks=needed,
    )  # fmt: skip
    return [(rank, *found[rank]) for rank in needed]


def _assert_tells(rank, types, text):
    assert "TransportError" in types and "RuntimeError" in types, f"rank {rank}: {types}: {text}"
    assert re.search(rf"rank {rank}\b", text, re.IGNORECASE), text
    assert re.search(r"bucket \d+", text, re.IGNORECASE), text
    names = [name for name, _ in Mlp().named_parameters()]
    assert any(name in text for name in names), f"no parameter of {names} in: {text}"


OURS = {"comm_hook": "bf16"}
TORCHS = {"comm_hook": default_hooks.allreduce_hook}
KILLS = {
    "default": ({}, 2),
    "unused search": ({"find_unused_parameters": True}, 2),
    "static graph": ({"static_graph": True}, 2),
    "copies": ({"gradient_as_bucket_view": False}, 2),
    "our hook over shm": ({**OURS, "transport": "shm"}, 2),
    "our hook over c10d": ({**OURS, "transport": "c10d"}, 2),
    "torch's hook": ({**TORCHS, "transport": "shm"}, 2),
    "three": ({}, 3),  # also a rank without a direct connection to the dead one in the ring
}


def _late(rank):
    """Rank 1 is killed; rank 2 gets its error and ends before rank 0 gets there."""
    model = torchddp.DDP(seeded(Fragile), transport="shm")
    for step in range(FAULT_STEP):
        step_on(model, rank, step)
    other = gathered(process_identity())[2]
    if rank == 1:
        model.module.signal_number = signal.SIGKILL
    while rank == 0 and look_up(other) != GONE:
        time.sleep(0.01)
    error = error_of(lambda: step_on(model, rank, FAULT_STEP))
    if rank == 2:
        os._exit(0)
    return error


def test_a_rank_that_has_ended_because_of_a_lost_one_is_not_blamed():
    _, text = run_ranks(_late, 3, needed_ranks=[0])[0]
    assert text.startswith("rank 1 died: ") and "rank 2" not in text, text


@pytest.mark.parametrize("kill", KILLS)
def test_killed_rank_is_detected_long_before_the_groups_timeout(ddp_class, kill):
    options, world_size = KILLS[kill]
    for rank, types, text in _survivors(ddp_class, signal.SIGKILL, world_size, options):
        _assert_tells(rank, types, text)


def test_killed_rank_is_named_if_only_a_connection_closes(ddp_class):
    for _, _, text in _survivors(ddp_class, signal.SIGKILL, 3, {"transport": "c10d"}):
        assert re.search(r"rank 1 is gone \(process \d+ of this host\)", text), text
        assert "join()" not in text and "first error in the ranks' logs" in text, text


# Before the second step ranks agree on new buckets: this wait is bounded too, but concerns no bucket.
@pytest.mark.parametrize(("limit_s", "steps_before"), [(None, 2), (5.0, 1)])
def test_rank_that_runs_one_step_fewer(ddp_class, limit_s, steps_before):
    """The other rank waits only for the group's timeout, or for a shorter `timeout=`."""

    def work(rank):
        ddp = ddp_class(seeded(Mlp), **({"timeout": timedelta(seconds=limit_s)} if limit_s else {}))
        for step in range(steps_before):
            step_on(ddp, rank, step)
        dist.barrier()
        if rank == 1:
            signal.pause()  # it stays connected until the other has raised, and is killed then
        return error_of(lambda: step_on(ddp, rank, steps_before))

    limits = {} if limit_s else {"group_timeout_s": LIMIT_S}
    types, text = run_ranks(work, 2, needed_ranks=[0], **limits)[0]
    assert "TransportError" in types and "rank 0" in text.lower(), f"{types}: {text}"
    if steps_before > 1:
        _assert_tells(0, types, text)


def _leaves(rank, when):
    """Rank 1 ends while rank 0 is between forward and backward of its last step."""
    model, store = torchddp.DDP(seeded(Mlp), transport="c10d"), dist.distributed_c10d._get_default_store()
    others = dist.new_group()

    def train():
        with model.join(divide_by_initial_world_size=False) if when == "join" else contextlib.nullcontext():
            for step in range(2):  # new buckets are agreed on before the second
                step_on(model, rank, step)
            if rank == 1 and when == "join":
                store.wait(["forward"])
                os._exit(3)
            loss = loss_of(model(batch(rank)))
            if rank == 0 and when == "futures":
                work = dist.all_reduce(torch.ones(2), group=others, async_op=True)
                model.reducer._install_post_backward_futures([work.get_future()])
            store.set("forward", "")
            loss.backward()
            os._exit(3)  # rank 1

    return error_of(train)


@pytest.mark.parametrize("when", ["join", "futures"])
def test_a_rank_that_leaves_is_a_transport_error_where_torch_waits(when):
    types, text = run_ranks(_leaves, 2, when, needed_ranks=[0])[0]
    assert "TransportError" in types and "rank 0, step 3: " in text, f"{types}: {text}"


def test_a_peer_is_not_gone_if_it_cant_be_looked_up():
    """There may be no free file descriptor."""

    def work(rank):
        reducer = torchddp.DDP(seeded(Mlp)).reducer
        identity = process_identity()
        reducer.set_peers([(1, identity["pid"], identity["started"])])
        held = []
        with pytest.raises(OSError, match="Too many open files"):
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            while True:
                held.append(os.dup(1))
        return reducer.with_failure_note("a cause")

    assert run_ranks(work, 1) == ["a cause"]


def _evaluates_alone(rank):
    model, x = torchddp.DDP(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), transport="shm"), torch.randn(4, 8)

    def train():
        for step in range(3):
            if rank == 0 and step == 2:
                model(x)
            model(x).sum().backward()

    return error_of(train)[1]


def test_a_rank_that_evaluates_alone_and_sends_its_buffers():
    texts = run_ranks(_evaluates_alone, 2)
    assert any("out of step" in text and "evaluate model.module on one" in text for text in texts), texts
