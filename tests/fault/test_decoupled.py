"""A peer that dies while averages are on their way, or before the next backward: the others raise within seconds."""

import os
import re
import signal
import time

import pytest

from tests.decoupled import make_pair
from tests.harness import run_outcomes
from tests.sharded import batch_of, loss_of, small_net

GROUP_TIMEOUT_S = 5.0
NOTICED_S = 5.0


def _until_an_error(rank, transport, number, when):
    pair = make_pair(make=small_net, transport=transport)
    model, optimizer = pair.model, pair.optimizer
    pair.train(range(3))
    if rank == 1 and when == "gathers begin":
        model.reducer._defer_gathers(lambda: os.kill(os.getpid(), number))
    loss_of(model(batch_of(rank, 3))).backward()
    if rank == 1:
        os.kill(os.getpid(), number)
    optimizer.step()
    optimizer.zero_grad()
    started_s = time.monotonic()
    try:
        for step in range(4, 7):
            loss_of(model(batch_of(rank, step))).backward()
            optimizer.step()
            optimizer.zero_grad()
    except Exception as error:
        seconds = time.monotonic() - started_s
        model.state_dict()  # nothing is left to wait for
        optimizer.state_dict()
        return [cls.__name__ for cls in type(error).__mro__], str(error), seconds
    return [], "no error", 0.0


@pytest.mark.parametrize("when", ["gathers begin", "backward is over"])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_killed_between_backward_and_forward(world_size, transport, when):
    needed = [rank for rank in range(world_size) if rank != 1]
    outcomes = run_outcomes(
        _until_an_error, world_size, transport, signal.SIGKILL, when,
        timeout=45, group_timeout_s=GROUP_TIMEOUT_S, straggler_s=20.0, needed_ranks=needed,
    )  # fmt: skip
    for rank in needed:
        assert outcomes[rank].error is None, f"rank {rank}: {outcomes[rank].error}"
        types, text, seconds = outcomes[rank].value
        assert "TransportError" in types, f"rank {rank}: {types}: {text}"
        assert re.search(rf"rank {rank}, step \d+: the reduction of bucket \d+ of \d+ \(parameters '", text), text
        assert seconds < (NOTICED_S if world_size == 2 else GROUP_TIMEOUT_S + NOTICED_S), (
            f"rank {rank}: {seconds:.1f} s"
        )


@pytest.mark.rest_is_thorough("shm")
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_stopped_rank_holds_up_the_others_until_the_time_limit(transport):
    outcomes = run_outcomes(
        _until_an_error, 2, transport, signal.SIGSTOP, "gathers begin",
        timeout=45, group_timeout_s=GROUP_TIMEOUT_S, straggler_s=20.0, needed_ranks=[0],
    )  # fmt: skip
    assert outcomes[0].error is None, outcomes[0].error
    types, text, seconds = outcomes[0].value
    assert "TransportError" in types and "bucket" in text, f"{types}: {text}"
    assert seconds < 2 * GROUP_TIMEOUT_S
