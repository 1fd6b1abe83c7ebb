"""Gradients equal torch DDP's for each dtype and odd shape; tests/fuzz covers more layouts and mixed dtypes."""

from functools import partial

import torch
from torch import nn

from tests.harness import each, on_ranks
from tests.models import Mlp, NormNet, batch, loss_of
from tests.parity.compare import RTOL, assert_same_as_torch


@on_ranks(1, 2, 3)
def test_dtype(ddp_class):
    for dtype in each(RTOL):

        def run(model, rank, step, dtype=dtype):
            loss_of(model(batch(rank, step, 5, 8, dtype=dtype))).backward()

        options = {"bucket_cap_mb": 0.002}
        assert_same_as_torch(ddp_class, partial(Mlp, dtype=dtype), run, dtype=dtype, options=options)


class MixedAndTransposed(nn.Module):
    """Layers of unlike dtypes, with weights that are not row-major."""

    def __init__(self):
        super().__init__()
        dtypes = (torch.float32, torch.float64, torch.bfloat16)
        self.layers = nn.ModuleList(nn.Linear(4, 6, dtype=dtype) for dtype in dtypes)
        for layer in self.layers:
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())

    def forward(self, x):
        return torch.stack([layer(x.to(layer.weight.dtype)).double() for layer in self.layers])


class Expanded(nn.Module):
    """Gradients that arrive expanded (stride 0), permuted, or as views of something larger."""

    def __init__(self):
        super().__init__()
        self.summed = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
        self.sliced = nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))

    def forward(self, x):
        scale = x.mean()
        return scale * (self.summed.sum() + self.sliced[:, ::2].sum() + (self.turned.t() + self.summed).sum())


class OddShapes(nn.Module):
    """A scalar, an empty tensor, one element, and sizes that don't fill a vector register."""

    def __init__(self):
        super().__init__()
        shapes = [(), (0,), (1,), (3, 0, 2), (7,), (17, 3), (1, 1, 1), (63,), (65,)]
        self.values = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, x):
        return x.mean() * sum((value * (i + 1)).square().sum() for i, value in enumerate(self.values))


@on_ranks(1, 2, 3)
def test_layout(ddp_class):
    choices = ({}, {"gradient_as_bucket_view": False}, {"bucket_cap_mb": 0.0001})
    makes = [(Expanded, torch.float64), (OddShapes, torch.float32), (MixedAndTransposed, torch.bfloat16)]
    for (make, dtype), options in each(makes, choices):

        def run(model, rank, step, dtype=dtype):
            loss_of(model(batch(rank, step, 3, 4, dtype=dtype))).backward()
            assert all(p.stride() == p.grad.stride() for p in model.parameters())

        assert_same_as_torch(ddp_class, make, run, dtype=dtype, options=options)


@on_ranks(1, 2, 3)
def test_channels_last_convolution(ddp_class):
    """Fused and `foreach` optimizers need gradients with the layout of their parameters."""
    channels_last = {"memory_format": torch.channels_last}

    def run(model, rank, step):
        loss_of(model(batch(rank, step, 4, 3, 6, 6, dtype=torch.float32).to(**channels_last))).backward()
        assert all(p.stride() == p.grad.stride() for p in model.parameters())

    def make():
        return NormNet(torch.float32).to(**channels_last)

    for set_to_none in each([True, False]):
        assert_same_as_torch(ddp_class, make, run, dtype=torch.float32, set_to_none=set_to_none)


@on_ranks(2)
def test_large_gradient_packed_by_several_threads(ddp_class):
    """A gradient large enough to be split between threads, with an uneven tail."""

    def run(model, rank, step):
        torch.set_num_threads(3)
        model(batch(rank, step, 1, dtype=torch.float32)).sin().sum().backward()

    make = partial(nn.Linear, 1, 1_300_003, bias=False)
    for options in each([{}, {"gradient_as_bucket_view": False}]):
        assert_same_as_torch(ddp_class, make, run, dtype=torch.float32, options=options)
