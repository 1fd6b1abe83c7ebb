"""The module that a program describes: independent parts, each with its own parameters and a scalar output."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.fuzz.program import Part
from tests.models import WithGradientIf

WIDTH = 6
BATCH = 4
FAULT = "a fault of the program's own"


class When(NamedTuple):
    """The step, microbatch and rank of a forward."""

    rank: int
    world_size: int
    step: int
    micro: int


# Which ranks and steps use a part.
USES: dict[str, Callable[[When], bool]] = {
    "always": lambda when: True,
    "never": lambda when: False,
    "one_rank": lambda when: when.rank == when.step % when.world_size,
    "all_but_one_rank": lambda when: when.rank != when.step % when.world_size or when.world_size == 1,
    "even_steps": lambda when: when.step % 2 == 0,
    "later_steps": lambda when: when.step > 1,
    "one_micro": lambda when: when.micro == 1,
    "mixed": lambda when: (3 * when.rank + 5 * when.step + when.micro) % 4 < 2,
}


def inputs(key: str, when: When) -> Tensor:
    """This rank's input of this forward."""
    generator = torch.Generator().manual_seed(hash_of(key, when.rank, when.step, when.micro))
    return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)


def hash_of(*parts: object) -> int:
    """A hash that is equal in every process, unlike Python's own hash of strings."""
    value = 0
    for character in repr(parts):
        value = (value * 1000003 + ord(character)) % (2**31 - 1)
    return value


class Dense(nn.Module):
    """A linear layer with a nonlinearity and, in training, dropout."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        rows, columns = (*part.shape, 5)[:2]
        self.first = nn.Linear(WIDTH, rows, dtype=getattr(torch, part.dtype))
        self.last = nn.Linear(rows, columns, bias=False, dtype=getattr(torch, part.dtype))
        self.dropout = 0.25 if part.layout == "gaps" else 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        return self.last(functional.dropout(hidden, self.dropout, self.training))


class Checkpointed(Dense):
    """Dense under activation checkpointing."""

    def __init__(self, part: Part) -> None:
        super().__init__(part)
        self.reentrant = part.kind == "checkpointed_reentrant"

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_() if self.reentrant else x
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Raw(nn.Module):
    """One parameter of any shape, dtype and layout."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        dtype = getattr(torch, part.dtype)
        self.weight = nn.Parameter(laid_out(part.shape, dtype, part.layout))

    def forward(self, x: Tensor) -> Tensor:
        numel = self.weight.numel()
        factor = x.flatten().repeat(numel // x.numel() + 1)[:numel].view(self.weight.shape)
        if self.weight.is_complex():
            factor = torch.complex(factor, 1 - factor)
        product = torch.sin(self.weight) * factor.to(self.weight.dtype)
        return torch.view_as_real(product) if product.is_complex() else product


class Summed(Raw):
    """One parameter whose gradient is an expanded number."""

    def forward(self, x: Tensor) -> Tensor:
        total = self.weight.sum()
        return torch.view_as_real(total * total).sin() if total.is_complex() else torch.sin(total)


class Twins(Raw):
    """Two parameters that get the same tensor as their gradient."""

    def __init__(self, part: Part) -> None:
        super().__init__(part)
        self.twin = nn.Parameter(torch.zeros_like(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.sin(self.weight + self.twin)
        return torch.view_as_real(total) if total.is_complex() else total


class Partly(Raw):
    """One parameter whose gradient is sometimes undefined."""

    def forward(self, x: Tensor) -> Tensor:
        value = WithGradientIf.apply(self.weight, bool(x[0, 0] > 0)).sin()
        return torch.view_as_real(value) if value.is_complex() else value


class Parametrized(nn.Module):
    def __init__(self, part: Part) -> None:
        super().__init__()
        dtype = getattr(torch, part.dtype)
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3, dtype=dtype))
        self.last = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.last(self.first(x.to(self.last.bias.dtype))))


class Recurrent(nn.Module):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.layers = nn.RNN(WIDTH, 3, num_layers=2, dtype=getattr(torch, part.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.to(self.layers.weight_ih_l0.dtype))[0]


def laid_out(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Tensor:
    """Random numbers with this memory layout."""
    real = torch.rand(shape, dtype=torch.float64) - 0.5
    value = torch.complex(real, real.neg()).to(dtype) if dtype.is_complex else real.to(dtype)
    if layout == "transposed" and value.dim() >= 2:
        return value.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "channels_last" and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    if layout == "gaps" and value.dim() >= 1:
        wide = torch.zeros(*shape[:-1], 2 * shape[-1], dtype=dtype)
        wide[..., ::2] = value
        return wide[..., ::2]
    return value


class Convolution(nn.Module):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        if part.layout == "channels_last":
            self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        images = x.float().flatten().repeat(5)[:100].view(2, 2, 5, 5)
        return torch.sin(self.norm(self.conv(images)))  # with a square, the gradient would be rounding noise


class Norm(nn.Module):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, dtype=getattr(torch, part.dtype), momentum=None if part.calls > 1 else 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.to(self.norm.weight.dtype)) ** 2


class Embedded(nn.Module):
    """An embedding or an embedding bag."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        kind: Any = nn.Embedding if part.kind == "embedding" else functools.partial(nn.EmbeddingBag, mode="sum")
        self.table = kind(*part.shape, sparse=part.sparse, dtype=getattr(torch, part.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.table((x.abs() * 1000).long() % self.table.num_embeddings))


class Buffered(nn.Module):
    """Buffers of several kinds, which forward changes, and one parameter."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand((), dtype=getattr(torch, part.dtype)))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.rand(WIDTH))
        self.register_buffer("hidden", torch.rand(3, dtype=torch.float64), persistent=False)
        self.register_buffer("mask", torch.rand(WIDTH) > 0.5)
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("halves", torch.rand(2, 3).to(torch.bfloat16).t())
        self.register_buffer("bytes", torch.randint(200, (5,), dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.add_(1)
            self.mean.mul_(0.5).add_(x.mean(0).float())
            self.hidden = self.hidden + x.mean()  # a new tensor
            self.halves.add_(x[0, 0].bfloat16())
        return self.scale * torch.where(self.mask, self.mean, 0.5).sum().to(self.scale.dtype)


KINDS: dict[str, type[nn.Module]] = {
    "dense": Dense,
    "checkpointed": Checkpointed,
    "checkpointed_reentrant": Checkpointed,
    "raw": Raw,
    "convolution": Convolution,
    "norm": Norm,
    "embedding": Embedded,
    "bag": Embedded,
    "buffered": Buffered,
    "summed": Summed,
    "twins": Twins,
    "partly": Partly,
    "parametrized": Parametrized,
    "recurrent": Recurrent,
}


@dataclass
class Outputs:
    numbers: list[Tensor]
    note: str = ""


class Zoo(nn.Module):
    """All parts; the loss is the sum of their outputs."""

    def __init__(self, parts: tuple[Part, ...], output: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(KINDS[part.kind](part) for part in parts)
        self.described = parts
        self.output = output
        self.fails = False
        ignored = []
        for i, (part, module) in enumerate(zip(parts, self.parts, strict=True)):
            if part.tied_to is not None:
                module.weight = self.parts[part.tied_to].weight
            if part.frozen:
                module.requires_grad_(False)
            if part.ignored:
                ignored += [f"parts.{i}.{name}" for name, _ in (*module.named_parameters(), *module.named_buffers())]
        if ignored:
            self._ddp_params_and_buffers_to_ignore = ignored

    def forward(self, x: Tensor, when: When) -> Any:
        numbers: list[Tensor] = []
        unused: list[Tensor] = []
        for i, (part, module) in enumerate(zip(self.described, self.parts, strict=True)):
            if self.fails and i == len(self.described) // 2:
                raise KeyError(FAULT)
            if not USES[part.used](when):
                continue
            for call in range(part.calls):
                number = module(x + call).double().sum()
                (numbers if part.in_loss else unused).append(number)
        return arrange(numbers, unused, self.output)


def arrange(numbers: list[Tensor], unused: list[Tensor], output: str) -> Any:
    """Arrange the outputs in the structure that the caller gets."""
    if output == "tensor":
        return torch.stack(numbers)
    if output == "list":
        return [*numbers, None, *unused]
    if output == "nested":
        return (numbers[0], [{"others": numbers[1:]}, 7], {"unused": unused})
    if output == "dataclass":
        return Outputs(numbers, "unused ones are left out")
    return {"numbers": torch.stack(numbers), "unused": unused}


def loss_of(output: Any) -> Tensor:
    """The loss of outputs in any of those structures, without the unused ones."""
    if isinstance(output, Tensor):
        numbers = list(output)
    elif isinstance(output, list):
        numbers = output[: next(i for i, number in enumerate(output) if number is None)]
    elif isinstance(output, tuple):
        numbers = [output[0], *output[1][0]["others"]]
    elif isinstance(output, Outputs):
        numbers = output.numbers
    else:
        numbers = list(output["numbers"])
    loss = sum(number * (0.5 + 0.25 * (i % 3)) for i, number in enumerate(numbers))
    assert isinstance(loss, Tensor)
    return loss
