"""Streams: gradients are complete before packing, averages before they are read, and the host never waits.

A sum over one rank moves nothing, and NCCL launches no kernel for it. With a divisor of two NCCL scales the large
gradients, by a kernel on the communication stream: there is something to wait for, and values that differ if nobody
does.
"""

import contextlib
import copy

import pytest
import torch
from torch import nn

from tests.gpu.test_graph import halving, side_stream
from tests.gpu.test_parity import WeightedSum
from tests.models import assert_grads, batch, grads_of, loss_of, seeded

WIDTH = 512  # weights of 1 MiB, which NCCL reduces where autograd allocated them
SLEEP_CYCLES = 20_000_000  # about ten milliseconds: far longer than a step of these models
LONG_SLEEP_CYCLES = 2_000_000_000  # about a second
LONG_NUMEL = 2**27  # NCCL's kernel for one rank, of at most 32 blocks, takes several times as long as a copy
STEPS = 5


class Delay(torch.autograd.Function):
    """Keeps backward's stream busy before the gradient is passed on."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        torch.cuda._sleep(SLEEP_CYCLES)
        return grad.clone()


class Late(nn.Module):
    """Layers whose gradients are late on the device, although the host returns at once."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = Delay.apply(torch.tanh(layer(x)))
        return x


class OnTwoStreams(nn.Module):
    """Two branches, each on its own stream if any are given; backward runs on the same streams."""

    def __init__(self, streams=()):
        super().__init__()
        self.trunk, self.left, self.right = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.streams = streams

    def __deepcopy__(self, memo):
        plain = OnTwoStreams().to(self.trunk.weight.device)
        plain.load_state_dict(self.state_dict())
        return plain

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        if not self.streams:
            return Delay.apply(self.left(hidden)) + Delay.apply(self.right(hidden))
        caller = torch.cuda.current_stream()
        outputs = []
        for stream, layer in zip(self.streams, (self.left, self.right), strict=True):
            stream.wait_stream(caller)
            hidden.record_stream(stream)
            with torch.cuda.stream(stream):
                output = Delay.apply(layer(hidden))
            output.record_stream(caller)
            outputs.append(output)
        for stream in self.streams:
            caller.wait_stream(stream)
        return outputs[0] + outputs[1]


def inputs(device, step):
    return batch(0, step, 64, WIDTH, dtype=torch.float32).to(device)


def reference(model, device, optimizer_of=None):
    """Halves of each step's gradients of the bare model, synchronizing the device after each."""
    plain = copy.deepcopy(model)
    optimizer = optimizer_of(plain.parameters()) if optimizer_of else None
    seen = []
    for step in range(STEPS):
        plain.zero_grad(set_to_none=True)
        loss_of(plain(inputs(device, step))).backward()
        for parameter in plain.parameters():
            parameter.grad.mul_(0.5)
        torch.cuda.synchronize()
        seen.append(grads_of(plain))
        if optimizer:
            optimizer.step()
    torch.cuda.synchronize()
    return seen, plain


def steps_of(ddp, device):
    """Gradients of each step, copied on the current stream without synchronization."""
    got = []
    for step in range(STEPS):
        ddp.zero_grad(set_to_none=True)
        loss_of(ddp(inputs(device, step))).backward()
        got.append(grads_of(ddp))
    return got


def assert_steps(got, want):
    torch.cuda.synchronize()
    for step, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert_grads(ours, theirs, rtol=0.0, what=f"step {step}:")


@pytest.mark.parametrize(("views", "aside"), [(None, False), (True, False), (False, False), (None, True)])
def test_late_gradients_are_waited_for(gpu, views, aside):
    """Also where the whole step is on a side stream."""
    model = seeded(Late).to(gpu)
    want, _ = reference(model, gpu)
    ddp = halving(model, bucket_cap_mb=0.5, gradient_as_bucket_view=views)
    with side_stream() if aside else contextlib.nullcontext():
        got = steps_of(ddp, gpu)
    assert_steps(got, want)


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": False}], ids=str)
def test_gradients_from_two_backward_streams(gpu, options):
    model = seeded(lambda: OnTwoStreams((torch.cuda.Stream(), torch.cuda.Stream()))).to(gpu)
    want, _ = reference(model, gpu)
    ddp = halving(model, bucket_cap_mb=25, **options)  # one bucket gets gradients from three streams
    assert_steps(steps_of(ddp, gpu), want)


@pytest.mark.parametrize("aside", [False, True])
def test_averages_are_complete_when_read(gpu, aside):
    """On the stream that was current when backward() returned, or on one that waits for it."""
    ddp = halving(WeightedSum(LONG_NUMEL, torch.float32).to(gpu))
    gradient = torch.randn(LONG_NUMEL, device=gpu)
    current = torch.cuda.current_stream()
    reader = torch.cuda.Stream() if aside else current
    for _ in range(3):
        ddp.zero_grad(set_to_none=True)
        ddp(gradient).backward()
        reader.wait_stream(current)
        with torch.cuda.stream(reader):
            got = ddp.module.weight.grad.clone()
        current.wait_stream(reader)  # before the gradient is freed
    torch.cuda.synchronize()
    assert torch.equal(got, gradient * 0.5)


def test_record_stream_protects_gradients_outside_of_buckets(gpu):
    """With gradient_as_bucket_view=False a reader on another stream may fall behind, as in torch."""
    model = seeded(Late).to(gpu)
    want, _ = reference(model, gpu)
    ddp = halving(model, bucket_cap_mb=0.5, gradient_as_bucket_view=False)
    reader = torch.cuda.Stream()
    got = []
    for step in range(STEPS):
        ddp.zero_grad(set_to_none=True)
        loss_of(ddp(inputs(gpu, step))).backward()
        reader.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(reader):
            torch.cuda._sleep(10 * SLEEP_CYCLES)  # longer than the next step's four delays
            got.append(grads_of(ddp))
        for parameter in ddp.parameters():
            parameter.grad.record_stream(reader)
    assert_steps(got, want)


def sgd(params):
    return torch.optim.SGD(params, lr=1e-4, momentum=0.9)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_steps_run_ahead_of_the_device(gpu, options):
    """The optimizer follows backward without synchronization, and freed memory is overwritten at once."""
    model = seeded(Late).to(gpu)
    _, trained = reference(model, gpu, sgd)
    ddp = halving(model, bucket_cap_mb=0.5, **options)
    optimizer = sgd(ddp.parameters())
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss_of(ddp(inputs(gpu, step))).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for _ in range(8):  # reuses the memory of gradients that were just freed
            torch.full((WIDTH, WIDTH), float("nan"), device=gpu)
    torch.cuda.synchronize()
    for (name, ours), theirs in zip(ddp.module.named_parameters(), trained.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def step_behind_a_busy_device(gpu, **options):
    """The model after a step that the device starts only after backward() has returned."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(gpu)
    ddp = halving(model, bucket_cap_mb=0.5, **options)
    x = inputs(gpu, 0)
    for _ in range(3):  # loads and allocations at first use may wait
        ddp.zero_grad(set_to_none=True)
        loss_of(ddp(x)).backward()
    ddp.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    asleep = torch.cuda.Event()
    torch.cuda._sleep(LONG_SLEEP_CYCLES)
    asleep.record()
    loss_of(ddp(x)).backward()
    assert not asleep.query(), "backward() waited for the device"
    torch.cuda.synchronize()
    return ddp


@pytest.mark.parametrize("transport", ["nccl", "c10d"])
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_the_host_does_not_wait_for_the_device(gpu, transport):
    """Not even for the map of used parameters, which is cleared for the next step before the device has read it."""
    step_behind_a_busy_device(gpu, transport=transport)
    ddp = step_behind_a_busy_device(gpu, transport=transport, find_unused_parameters=True)
    assert ddp.reducer._get_local_used_map().tolist() == [1] * len(list(ddp.parameters()))
