"""refresh_trainable(): after any change of parameters, training goes on as with a wrapper made anew."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchddp
from tests.harness import on_ranks
from tests.models import same_on_all_ranks
from tests.thaw import OPTIMIZERS, assert_equal, play, sides_of

pytestmark = pytest.mark.beyond_torch("has no refresh_trainable()")

SCHEDULES = 20
UNUSED = {"find_unused_parameters": True}


def ddp(**options):
    return lambda module: torchddp.DistributedDataParallel(module, **options)


def replicated(**options):
    return lambda module: torchddp.replicate(module, **options)


def play_all(rank, make, fresh=None, seeds=range(SCHEDULES), is_told=True, buffers=True):
    changes = 0
    for seed in seeds:
        sides = sides_of(make, fresh or make, list(OPTIMIZERS)[seed % 2], is_told=is_told)

        def check(was_forward, sides=sides):
            assert_equal(sides, buffers=buffers and was_forward)

        changes += play(rank, seed, sides, check)
        assert same_on_all_ranks([torch.cat([p.detach().reshape(-1) for p in sides[0].module.parameters()])])
    assert changes > 2 * len(seeds)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("make", [ddp, replicated])
@on_ranks(1, 2, 3, 4)
def test_random_schedules_as_if_wrapped_anew(rank, make, transport):
    play_all(rank, make(transport=transport))


@on_ranks(1, 2)
def test_random_schedules_as_torchs_class_made_anew(rank):
    """At these sizes sums have one order. AdamW makes much of rounding: a bias before a norm has gradients of zero."""
    play_all(rank, ddp(), TorchDDP)


@pytest.mark.parametrize(
    "options",
    [
        UNUSED,
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": False},
        {"bucket_cap_mb": 0.0005},
        {"bucket_cap_mb": "auto"},
        {"gradient_stats": True, "find_nonfinite": True, "check_parameters_every": 1},
        {"skip_all_reduce_unused_params": True, **UNUSED},
        {"forward_sync_buffers": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [ddp, replicated])
@on_ranks(2)
def test_options_go_on(rank, make, options):
    own_buffers = "forward_sync_buffers" in options  # which a fresh wrapper sends once
    play_all(rank, make(**options), seeds=range(SCHEDULES, SCHEDULES + 4), buffers=not own_buffers)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("make", [ddp, replicated])
@on_ranks(1, 2, 3)
def test_noticed_in_forward(rank, make, transport):
    automatic = make(transport=transport, auto_refresh_trainable=True)
    play_all(rank, automatic, make(transport=transport), seeds=range(6), is_told=False, buffers=False)
