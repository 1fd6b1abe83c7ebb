"""What the extension offers of its kernels."""

import math

import pytest
import torch

from torchddp import _C


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_measure(dtype: torch.dtype) -> None:
    values = torch.randn(5003, generator=torch.Generator().manual_seed(1)).to(dtype)
    sum_squares, non_finite = _C.measure(values)
    assert sum_squares == pytest.approx(values.double().square().sum().item(), rel=1e-12)
    assert non_finite == 0
    values[7] = math.inf
    values[5002] = math.nan
    sum_squares, non_finite = _C.measure(values)
    assert math.isnan(sum_squares)
    assert non_finite == 2


def test_measure_takes_complex_numbers_as_pairs() -> None:
    values = torch.tensor([3 + 4j, complex(1, math.inf)])
    assert _C.measure(values[:1]) == (25.0, 0)
    assert _C.measure(values) == (math.inf, 1)


def test_measure_says_what_it_wants() -> None:
    with pytest.raises(RuntimeError, match="contiguous CPU tensor, got sizes .2. with strides .2."):
        _C.measure(torch.ones(4)[::2])
    with pytest.raises(RuntimeError, match="floating point or complex elements, got Int"):
        _C.measure(torch.ones(4, dtype=torch.int32))
