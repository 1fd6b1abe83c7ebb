"""A rank dies or stalls mid-step: the others raise, naming rank, bucket and parameters, and never hang."""

import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.fault.test_shm_faults import error_of
from tests.harness import run_ranks
from tests.models import Mlp, seeded, step_on

GROUP_TIMEOUT_S = 2.0
DEATH_NOTICED_S = 5.0  # a closed connection is detected at once; the rest allows for a busy machine
MARGIN_S = 6.0
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


def _train_until_fault(rank, ddp_class, number, options, settle_s):
    model = seeded(Fragile)
    ddp = ddp_class(model.float() if "comm_hook" in options else model, bucket_cap_mb=0.001, **options)
    for step in range(FAULT_STEP):
        ddp.zero_grad()
        step_on(ddp, rank, step)
    time.sleep(settle_s)
    dist.barrier()
    if rank == 1:
        ddp.module.signal_number = number
    # An asynchronous transport may detect the fault one step later.
    return error_of(lambda: [step_on(ddp, rank, FAULT_STEP + step) for step in range(3)])


def _survivors(ddp_class, number, world_size, options, settle_s=0.0):
    needed = [rank for rank in range(world_size) if rank != 1]
    found = run_ranks(
        _train_until_fault, world_size, ddp_class, number, options, settle_s,
        timeout=45, group_timeout_s=GROUP_TIMEOUT_S, straggler_s=20.0, needed_ranks=needed,
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


@pytest.mark.parametrize("kill", KILLS)
def test_killed_rank_is_detected_within_seconds(ddp_class, kill):
    options, world_size = KILLS[kill]
    for rank, types, text, seconds in _survivors(ddp_class, signal.SIGKILL, world_size, options):
        _assert_tells(rank, types, text)
        assert seconds < DEATH_NOTICED_S, f"rank {rank} took {seconds:.1f} s"


def test_killed_rank_is_named_if_only_a_connection_closes(ddp_class):
    for _, _, text, _ in _survivors(ddp_class, signal.SIGKILL, 3, {"transport": "c10d"}, settle_s=1.0):
        assert re.search(r"rank 1 is gone \(process \d+ of this host\)", text), text


def test_stopped_rank_is_detected_within_the_groups_timeout(ddp_class):
    for rank, types, text, seconds in _survivors(ddp_class, signal.SIGSTOP, 2, {}):
        _assert_tells(rank, types, text)
        assert GROUP_TIMEOUT_S * 0.5 < seconds < GROUP_TIMEOUT_S + MARGIN_S, f"rank {rank} took {seconds:.1f} s"


# Before the second step ranks agree on new buckets: this wait is bounded too, but concerns no bucket.
@pytest.mark.parametrize(("limit_s", "steps_before"), [(None, 2), (1.0, 1)])
def test_rank_that_runs_one_step_fewer(ddp_class, limit_s, steps_before):
    """The other rank waits only for the group's timeout, or for a shorter `timeout=`."""

    def work(rank):
        ddp = ddp_class(seeded(Mlp), **({"timeout": timedelta(seconds=limit_s)} if limit_s else {}))
        for step in range(steps_before):
            step_on(ddp, rank, step)
        dist.barrier()
        if rank == 1:
            time.sleep(GROUP_TIMEOUT_S + 1)
            return None
        return error_of(lambda: step_on(ddp, rank, steps_before))

    types, text, seconds = run_ranks(work, 2, timeout=40, group_timeout_s=30.0 if limit_s else GROUP_TIMEOUT_S)[0]
    assert seconds < (2 * limit_s if limit_s else GROUP_TIMEOUT_S + MARGIN_S), f"{seconds:.1f} s: {text}"
    assert "TransportError" in types and "rank 0" in text.lower(), f"{types}: {text}"
    if steps_before > 1:
        _assert_tells(0, types, text)
