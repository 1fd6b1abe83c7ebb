"""Random models whose step is captured as a graph of the simulated GPU, and replayed: the CPU's values, bit for bit."""

import random
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import torchddp
from tests.simgpu.device import simulated
from tests.simgpu.program import WIDTH, Model, on
from tests.whole_buckets import large_from, packed_whole
from torchddp.ddp.session import ReducerSession

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": False},
    {"checks": torchddp.Checks(gradient_stats=True)},
    {"precision": torchddp.Precision(reduce=torch.float32)},
)


@dataclass(frozen=True)
class Captured:
    seed: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    options: dict[str, Any]
    in_place_bytes: int
    late: int
    aside: int  # index of a layer that runs on a stream of its own; -1: none
    wrapped_elsewhere: bool  # on another stream than the captured one, from which gradients then come
    updates_inside: bool  # the optimizer's step is captured, too
    eager: int  # steps before the capture
    replays: int


def draw(seed: int) -> Captured:
    rng = random.Random(seed)
    layers = rng.randint(2, 5)
    return Captured(
        seed=seed,
        widths=tuple(rng.choice((1, 5, 64, 300)) for _ in range(layers)),
        dtype=rng.choice((torch.float32, torch.float32, torch.bfloat16)),
        options={**rng.choice(OPTIONS), "bucket_cap_mb": rng.choice((0.0005, 0.005, 0.02, 25))},
        in_place_bytes=rng.choice((0, 1, 1000)),
        late=rng.choice((0, 50, 100)),
        aside=rng.randrange(layers) if rng.random() < 0.5 else -1,
        wrapped_elsewhere=rng.random() < 0.3,
        updates_inside=rng.random() < 0.5,
        eager=rng.randint(1, 2),
        replays=rng.randint(1, 4),
    )


def run(program: Captured, rank: int, device: torch.device, transport: str) -> list[Tensor]:
    """The gradients of every step and, at the end, the weights; on the CPU. On a device, most steps are replays."""
    on_device = device.type != "cpu"
    torch.manual_seed(program.seed)
    model = Model(program.widths, (program.dtype,) * len(program.widths))
    stream = torch.Stream(device=device) if on_device else None
    wrapping = torch.Stream(device=device) if on_device and program.wrapped_elsewhere else stream
    with on(stream):
        model = model.to(device)
        model.stream = torch.Stream(device=device) if on_device else None
    if wrapping is not None and wrapping is not stream:
        wrapping.wait_stream(stream)
    with on(wrapping), packed_whole() if not on_device else large_from(program.in_place_bytes):
        ddp = torchddp.DistributedDataParallel(model, transport=transport, **program.options)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01, foreach=False)
    torch.manual_seed(1000 * program.seed + rank)
    batches = [torch.randn(3, WIDTH) for _ in range(program.eager + program.replays)]
    seen: list[Tensor] = []
    with on(stream):
        if wrapping is not None and wrapping is not stream:
            torch.accelerator.current_stream().wait_stream(wrapping)
        values = batches[0].to(device)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            ddp(values, -1, program.aside).square().mean().backward()
            if program.updates_inside:
                optimizer.step()

        replay = None
        for number, batch in enumerate(batches):
            values.copy_(batch)
            if on_device and number == program.eager:
                replay = graph_of(step)
            if replay is None:
                step()
            else:
                replay()
            seen += [p.grad.clone() for p in parameters]
            if not program.updates_inside:
                optimizer.step()
        seen += parameters
        return [value.detach().cpu() for value in seen]


def graph_of(step: Any) -> Any:
    """Capture a step, or any function; returns what replays it."""
    simulated.begin_capture()
    with mock.patch.object(ReducerSession, "is_captured", True):
        step()
    number = simulated.end_capture()
    return lambda: simulated.replay(number)
