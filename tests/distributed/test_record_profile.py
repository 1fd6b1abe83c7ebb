"""`record_profile` on real ranks: what a small step costs besides computing is in the profile, so the model fits it."""

import itertools
import time

import pytest
import torch
from torch import nn

from tests.harness import gathered, on_ranks
from torchddp import DistributedDataParallel
from torchddp.plan.record_profile import record_profile
from torchddp.simulate.predict import model_error

SLEEP_S = 0.05


@pytest.mark.parametrize("transport", ["c10d", "shm"])
@on_ranks(2)
def test_the_model_fits_a_small_step_with_overhead_and_a_late_rank(rank, transport):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), transport=transport)
    steps = itertools.count()

    def step():
        # One of them is late in each step, before its forward begins.
        if next(steps) % 2 == rank:
            time.sleep(SLEEP_S)
        ddp(torch.ones(2, 16)).sum().backward()

    profile = record_profile(ddp, step, steps=4)
    assert next(steps) >= 4 + 2 * 4
    assert 0.8 * SLEEP_S < profile.overhead_s < 3 * SLEEP_S, profile
    error = model_error(profile)
    assert error is not None and abs(error) < 0.4, profile
    assert gathered(profile.to_dict()) == [profile.to_dict()] * 2


@on_ranks(2)
def test_of_short_steps_more_are_recorded():
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    steps = itertools.count()

    def step():
        next(steps)
        ddp(torch.ones(1, 4)).sum().backward()

    record_profile(ddp, step, steps=1)
    assert next(steps) > 4 + 2 * 4
    with pytest.raises(ValueError, match="steps must be at least 1"):
        record_profile(ddp, step, steps=0)
