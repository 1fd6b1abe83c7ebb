"""From which size on gradients on a device are reduced where autograd made them."""

import pytest

from torchddp.ddp.options import DDPOptions

MIB = 2**20


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, MIB),
        ({"gradient_as_bucket_view": False}, MIB),
        ({"gradient_as_bucket_view": True}, 0),
        ({"adopt_large_gradients": False}, 0),
    ],
)
def test_large_gradients_are_adopted_unless_the_user_says_otherwise(options, expected):
    assert DDPOptions(**options).adopt_bytes == expected
