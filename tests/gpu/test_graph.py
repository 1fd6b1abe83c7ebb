"""A training step as one CUDA graph, captured after one eager step, is bitwise equal to eager training.

With a divisor of two NCCL launches a kernel for each large gradient, also for one rank.
"""

import contextlib
import copy

import pytest
import torch

from tests.gpu.cases import LARGE_BYTES, sgd
from tests.models import Branches, Mlp, batch, loss_of, seeded
from tests.whole_buckets import large_from
from torchddp import DistributedDataParallel

WIDTH = 128
REPLAYS = 6


def inputs(device):
    return [batch(0, step, 16, WIDTH, dtype=torch.float32).to(device) for step in range(1 + REPLAYS)]


def halving(model, **options):
    """The wrapped model. It divides by two, as with two ranks."""
    ddp = DistributedDataParallel(model, **options)
    ddp.reducer.set_divisor(lambda: 2)
    return ddp


def train_eagerly(model, device):
    plain = copy.deepcopy(model)
    optimizer = sgd(plain.parameters())
    for x in inputs(device):
        optimizer.zero_grad(set_to_none=True)
        loss_of(plain(x)).backward()
        for parameter in plain.parameters():
            parameter.grad.mul_(0.5)
        optimizer.step()
    torch.cuda.synchronize()
    return plain


@contextlib.contextmanager
def side_stream():
    """Run on another stream, synchronized with the current one before and after."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield side
    torch.cuda.synchronize()


def make_model(device):
    return seeded(lambda: Mlp(WIDTH, torch.float32)).to(device)


@pytest.mark.parametrize("optimizer_inside", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"gradient_as_bucket_view": False},
        {"bucket_cap_mb": 0.1},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("limit_bytes", [0, LARGE_BYTES])
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_captured_step_equals_eager_steps(gpu, options, optimizer_inside, limit_bytes):
    check_captured_step(gpu, options, optimizer_inside, limit_bytes)


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("limit_bytes", [0, LARGE_BYTES])
def test_a_model_wrapped_on_another_stream_than_it_is_captured_on(gpu, options, limit_bytes):
    """Gradients arrive on the stream of the wrapping, which joins the capture: any can but the default stream."""
    check_captured_step(gpu, options, True, limit_bytes, wrap_on=side_stream)


def check_captured_step(gpu, options, optimizer_inside, limit_bytes, wrap_on=contextlib.nullcontext):
    model = make_model(gpu)
    want = train_eagerly(model, gpu)
    batches = inputs(gpu)
    static = batches[0].clone()
    graph = torch.cuda.CUDAGraph()
    with side_stream() as side:
        with wrap_on(), large_from(limit_bytes):
            ddp = halving(model, **options)
        optimizer = sgd(ddp.parameters())

        def forward_backward():
            loss_of(ddp(static)).backward()
            if optimizer_inside:
                optimizer.step()

        forward_backward()
        if not optimizer_inside:
            optimizer.step()
        # Without a gradient, backward writes one; otherwise each replay would add to the previous gradient.
        optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph, stream=side):
        forward_backward()
    for x in batches[1:]:
        static.copy_(x)
        graph.replay()
        if not optimizer_inside:
            optimizer.step()
    torch.cuda.synchronize()
    for (name, ours), theirs in zip(ddp.module.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(ours, theirs), f"'{name}' differs by {(ours - theirs).abs().max().item():g}"


def test_a_step_with_unused_parameters_is_not_captured(gpu):
    """Their gradients depend on other ranks, which the host can't query during capture."""
    model = seeded(lambda: Branches(torch.float32)).to(gpu)
    static = batch(0, 0, 2, 4, dtype=torch.float32).to(gpu)
    with side_stream() as side:
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        loss_of(ddp(static, "left")).backward()
        ddp.zero_grad(set_to_none=True)
    # The capture can't succeed, because collectives are still running.
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side):
        output = loss_of(ddp(static, "left"))
        with pytest.raises(
            RuntimeError, match=r"parameter '\w+\.\w+' was not used in a step that a CUDA graph captures"
        ):
            output.backward()


def test_eager_steps_go_on_after_a_capture(gpu):
    model = make_model(gpu)
    static = inputs(gpu)[0]
    with side_stream() as side:
        ddp = DistributedDataParallel(model)
        loss_of(ddp(static)).backward()
        ddp.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        loss_of(ddp(static)).backward()
    graph.replay()
    torch.cuda.synchronize()
    captured = [p.grad.clone() for p in ddp.parameters()]
    ddp.zero_grad(set_to_none=True)
    loss_of(ddp(static)).backward()
    torch.cuda.synchronize()
    for eager, replayed in zip(ddp.parameters(), captured, strict=True):
        assert torch.equal(eager.grad, replayed)
