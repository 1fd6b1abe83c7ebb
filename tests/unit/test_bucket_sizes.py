"""Default bucket sizes over shared memory, from the cost of a message."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchddp.ddp import bucket_sizes
from torchddp.ddp.bucket_sizes import shared_sizes
from torchddp.ddp.options import DDPOptions
from torchddp.transport.message_cost import MessageLine

KIB, MIB = 1024, 1024 * 1024
costs = st.builds(MessageLine, st.floats(0, 1), st.floats(0, 1e-6))


def line_through(small_us: float, mebibyte_us: float) -> MessageLine:
    """The cost line through the times of an almost empty message and of a 1 MiB message."""
    return MessageLine(small_us * 1e-6, (mebibyte_us - small_us) * 1e-6 / MIB)


@pytest.mark.parametrize(
    ("small_us", "mebibyte_us", "cap_mib", "solo_kib"),
    [
        (2.5, 21, 1, 256),  # two ranks with one processor each
        (3.5, 21, 1, 256),  # the same with measurement error
        (46, 104, 4, 512),  # four ranks that share two processors
        (94, 342, 2, 256),  # eight ranks on two processors
        (1000, 1100, 25, 3200),  # the cost per byte is negligible
    ],
)
def test_expensive_messages_make_large_buckets(small_us, mebibyte_us, cap_mib, solo_kib):
    assert shared_sizes(line_through(small_us, mebibyte_us)) == (cap_mib * MIB, solo_kib * KIB)


@given(costs)
def test_sizes_are_steps_between_the_smallest_and_the_largest(line):
    cap, solo = shared_sizes(line)
    assert cap in {*(MIB << step for step in range(5)), 25 * MIB}
    assert 256 * KIB <= solo <= cap // 4


@given(costs)
def test_the_fixed_cost_is_about_an_eighth_of_a_messages_time(line):
    cap, _ = shared_sizes(line)
    if cap < 25 * MIB:
        # The cap may be too small by half a step, a factor of sqrt(2).
        assert line.alpha_s <= math.sqrt(2) / 7 * cap * line.beta_s_per_byte * (1 + 1e-9)


@given(costs, st.floats(1, 100))
def test_costlier_messages_never_make_smaller_buckets(line, factor):
    dearer = line._replace(alpha_s=line.alpha_s * factor)
    assert shared_sizes(dearer) >= shared_sizes(line)


def test_sizes_that_the_user_sets():
    for arguments, caps in (
        ({}, []),
        ({"bucket_cap_mb": "auto"}, []),
        ({"bucket_cap_mb": 0.5}, [512 * KIB]),
        ({"bucket_cap_mb_list": [1, 3]}, [MIB, 3 * MIB]),
    ):
        assert DDPOptions(**arguments).asked_caps == caps
    # The size from which gradients on a device are reduced where autograd allocated them.
    for arguments, expected in (
        ({}, MIB),
        ({"gradient_as_bucket_view": False}, MIB),
        ({"gradient_as_bucket_view": True}, 0),
        ({"adopt_large_gradients": False}, 0),
    ):
        assert DDPOptions(**arguments).adopt_bytes == expected


class AnyMemory:
    reaches_any_memory = True


@pytest.mark.parametrize(("device", "sizes"), [("cpu", ([MIB, 8 * MIB], MIB)), ("meta", ([MIB, 25 * MIB], 0))])
def test_transports_that_reach_any_memory_are_not_measured(device, sizes):
    parameters = [torch.empty(4 * MIB, device=device)]
    assert bucket_sizes.default_sizes(parameters, AnyMemory(), None) == sizes
