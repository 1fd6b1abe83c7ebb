"""Random training programs, run on the simulated GPU and on the CPU: the same gradients and weights, bit for bit."""

import contextlib
import datetime
import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import torchddp
from tests.simgpu.group import hooks_use_groups
from tests.whole_buckets import large_from, packed_whole
from torchddp import comm_hooks
from torchddp.optim import OSS
from torchddp.sharded import ShardedDataParallel

WIDTH = 12
PRECISIONS = tuple(
    {"precision": precision}
    for precision in (
        torchddp.Precision(reduce=torch.float32),
        torchddp.Precision(main_grads=torch.float32),
        torchddp.Precision(main_grads=torch.float32, main_grads_as="grad"),
    )
)


@dataclass(frozen=True)
class Step:
    batches: int  # of which all but the last accumulate
    syncs_all: bool  # ... or none does
    to_none: bool  # what zero_grad does
    left_out: int  # index of a layer that this step does not use; -1: none
    aside: int  # index of a layer that runs on a stream of its own; -1: none
    clips: bool
    reads_aside: bool  # another stream reads the gradients
    keeps: bool  # the program keeps the gradients
    drops: bool  # it drops them after backward, and their memory is used again where it came from


@dataclass(frozen=True)
class Program:
    seed: int
    widths: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    homes: tuple[int, ...]  # on which of a few streams the gradients of each layer are accumulated
    options: dict[str, Any]
    sharded: bool
    # "": none; "here" or "aside": one that works on the current stream, or on another one; otherwise one of ours
    hook: str
    in_place_bytes: int  # gradients from this size on are reduced in place; 0: none
    late: int
    optimizer: str
    steps: tuple[Step, ...]
    has_first: bool  # another wrapped model, on a communicator of its own, makes the input


def draw(seed: int) -> Program:
    rng = random.Random(seed)
    layers = rng.randint(2, 6)
    unused = rng.random() < 0.4
    static = not unused and rng.random() < 0.2
    mixed = rng.random() < 0.3
    spread = rng.random() < 0.5

    sharded = rng.random() < 0.2
    # A sharded optimizer updates several parameters at once. At the end of a tensor torch rounds 16 bits another way.
    others = (torch.float64,) if sharded else (torch.float64, torch.bfloat16, torch.complex64)
    dtypes = tuple(rng.choice((torch.float32, *others)) if mixed else torch.float32 for _ in range(layers))

    def step() -> Step:
        return Step(
            batches=rng.choice((1, 1, 1, 2, 3)),
            syncs_all=not static and rng.random() < 0.3,
            to_none=rng.random() < 0.7,
            left_out=rng.randrange(layers) if unused and rng.random() < 0.7 else -1,
            aside=rng.randrange(layers) if rng.random() < 0.5 else -1,
            clips=rng.random() < 0.3 and not {torch.float64, torch.complex64} & {*dtypes},  # the last bits differ
            reads_aside=rng.random() < 0.3,
            keeps=rng.random() < 0.3,
            drops=rng.random() < 0.2,
        )

    options: dict[str, Any] = {"find_unused_parameters": unused, "static_graph": static}
    options["weighted"] = not static and rng.random() < 0.2
    if sharded:
        options["reduce_buffer_size"] = rng.choice((0, 100, 2**23))
    else:
        nonfinite, stats = rng.choice((False, False, True, "raise")), rng.random() < 0.3
        options["checks"] = torchddp.Checks(nonfinite=nonfinite, gradient_stats=stats)
        options["bucket_cap_mb"] = rng.choice((0.0005, 0.005, 0.02, 25))
        choices = *({} for _ in range(3)), *({"gradient_as_bucket_view": views} for views in (True, True, False))
        options.update(rng.choice(choices if options["weighted"] else (*choices, *PRECISIONS)))

    takes_hooks = not sharded and not options["weighted"] and "precision" not in options
    ours = (*comm_hooks.NAMES,) if {*dtypes} <= {torch.float32, torch.bfloat16} else ()
    hooks = ("here", "aside", *rng.sample(ours, min(2, len(ours))))
    return Program(
        seed=seed,
        widths=tuple(rng.choice((1, 5, 64, 300)) for _ in range(layers)),
        dtypes=dtypes,
        homes=tuple(rng.randrange(3) if spread else 0 for _ in range(layers)),
        options=options,
        sharded=sharded,
        hook=rng.choice(hooks) if takes_hooks and rng.random() < 0.5 else "",
        in_place_bytes=rng.choice((0, 1, 1000)),
        late=rng.choice((0, 50, 100)),
        optimizer="SGD" if "precision" in options else rng.choice(("SGD", "Adam")),  # Adam wants one dtype
        steps=tuple(step() for _ in range(rng.randint(2, 5))),
        has_first=not static and rng.random() < 0.2,
    )


class Layer(nn.Module):
    """Its input plus a function of it, so that a step can leave it out."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, width, dtype=dtype)
        self.narrow = nn.Linear(width, WIDTH, bias=False, dtype=dtype)

    def forward(self, values: Tensor) -> Tensor:
        result = self.narrow(self.wide(values.to(self.wide.weight.dtype)).tanh())
        return values + (torch.view_as_real(result).sum(-1) if result.is_complex() else result.to(values.dtype))


class Model(nn.Module):
    def __init__(self, widths: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, widths, dtypes))
        self.stream: torch.Stream | None = None  # of layers that run beside the others; None on the CPU

    def forward(self, values: Tensor, left_out: int, aside: int) -> Tensor:
        side = None
        for index, layer in enumerate(self.layers):
            if index == aside:  # beside the others, which don't wait for it
                side = waiting_for(values, self.stream)
                with on(side):
                    branch = layer(values)
            elif index != left_out:
                values = layer(values)
        if side is not None:
            torch.accelerator.current_stream().wait_stream(side)
            branch.record_stream(torch.accelerator.current_stream())
        return values if aside < 0 else values + branch


def waiting_for(values: Tensor, stream: torch.Stream | None = None) -> torch.Stream | None:
    """A stream, a new one if none is given, that waits for `values`, which it may use."""
    if values.device.type == "cpu":
        return None
    stream = stream or torch.Stream(device=values.device)
    stream.wait_stream(torch.accelerator.current_stream())
    values.record_stream(stream)
    return stream


def on(stream: torch.Stream | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else stream


def run(program: Program, rank: int, device: torch.device, transport: str) -> list[Tensor]:
    """Everything that the program sees: gradients, norms and, at the end, the weights; on the CPU."""
    torch.manual_seed(program.seed)
    model = Model(program.widths, program.dtypes).to(device)
    model.stream = None if device.type == "cpu" else torch.Stream(device=device)
    nodes = _accumulate_at_home(model, program.homes, device)
    parameters = list(model.parameters())
    options = program.options
    optimizer_class = getattr(torch.optim, program.optimizer)
    settings = {"lr": 0.01, "foreach": False}
    # On the CPU, too, buckets are packed once they are complete: then kept views are overwritten in the same steps.
    with packed_whole() if device.type == "cpu" else large_from(program.in_place_bytes):
        if program.sharded:
            optimizer = OSS(parameters, optimizer_class, **settings)
            ddp = ShardedDataParallel(model, optimizer, transport=transport, **options)
        else:
            ddp = torchddp.DistributedDataParallel(model, transport=transport, **options)
            optimizer = optimizer_class(parameters, **settings)
            if program.hook in comm_hooks.NAMES:
                hook = comm_hooks.NAMES[program.hook]()
                hook.hierarchical = program.seed % 2 == 1
                with hooks_use_groups() if device.type != "cpu" else contextlib.nullcontext():
                    ddp.register_comm_hook(None, hook)
            elif program.hook:
                ddp.register_comm_hook(None, Hook(ddp, model.stream if program.hook == "aside" else None))
        first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(device)
        if program.has_first:
            first = torchddp.DDP(first, transport=transport, bucket_cap_mb=0.0005, process_group=second_group())
    torch.manual_seed(1000 * program.seed + rank)
    seen: list[Tensor] = []
    for step in program.steps:
        if program.hook in comm_hooks.NAMES and step.keeps:  # as after a restart
            hook.load_state_dict(hook.state_dict())
        optimizer.zero_grad(set_to_none=step.to_none)
        for batch in range(step.batches):
            values = torch.randn(3, WIDTH).to(device)
            last = batch == step.batches - 1
            with contextlib.ExitStack() as stack:
                if not (last or step.syncs_all):
                    stack.enter_context(ddp.no_sync())
                    if program.has_first:
                        stack.enter_context(first.no_sync())
                if options["weighted"]:
                    ddp.weigh(1 + (rank + batch) % 3)
                if program.has_first:
                    values = first(values)
                ddp(values, step.left_out, step.aside).square().mean().backward()
        if step.drops:
            optimizer.zero_grad()
            with on(model.stream):
                _ = [torch.zeros_like(p) for p in parameters]
        if step.clips:
            seen.append(nn.utils.clip_grad_norm_(parameters, 0.1, foreach=False))
        found = [p.grad if p.grad is not None else getattr(p, "main_grad", None) for p in parameters]
        gradients = [gradient for gradient in found if gradient is not None]
        seen += gradients if step.keeps and step.to_none else _copies(gradients, step.reads_aside)
        optimizer.step()
    seen += [p.grad for p in first.parameters() if program.has_first]
    seen += model.parameters()  # not those above: a sharded model's may be under way
    del nodes
    return [value.detach().cpu() for value in seen]


@functools.cache
def second_group() -> torch.distributed.ProcessGroup:
    return torch.distributed.new_group()


class Hook:
    """A communication hook that sums as the transport does, so that the order of the ranks is the same everywhere.

    It works on the current stream, or on ``stream``; then it returns a tensor of its own.
    """

    def __init__(self, ddp: torchddp.DistributedDataParallel, stream: torch.Stream | None) -> None:
        self.transport, self.stream = ddp.reducer.transport, stream

    def __call__(self, state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        with on(self.stream and waiting_for(buffer[:0], self.stream)):
            average = buffer.div_(self.transport.size)
            work = self.transport.make_work()
            self.transport.all_reduce(average, work)
            work.wait(datetime.timedelta(minutes=1))
            devices = [] if buffer.is_cpu else [buffer.device]
            future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
            future.set_result(average.clone() if self.stream else average)
            return future


def _accumulate_at_home(model: Model, homes: tuple[int, ...], device: torch.device) -> list[Any]:
    """Nodes that keep the streams on which torch accumulates the gradients."""
    if device.type == "cpu" or not any(homes):
        return []
    here = torch.accelerator.current_stream()
    streams = [here, model.stream, torch.Stream(device=device)]
    nodes = []
    for home, layer in zip(homes, model.layers, strict=True):
        streams[home].wait_stream(here)
        with streams[home]:
            nodes += [p.expand_as(p).grad_fn.next_functions[0][0] for p in layer.parameters()]
    return nodes


def _copies(gradients: list[Tensor], aside: bool) -> list[Tensor]:
    """As a reader on another stream makes them, which the program then waits for."""
    stream = waiting_for(gradients[0]) if aside and gradients else None
    with on(stream):
        copies = [gradient.clone() for gradient in gradients]
    if stream is not None:
        torch.accelerator.current_stream().wait_stream(stream)
    return copies
