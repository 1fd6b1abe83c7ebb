"""Small models and reference gradients shared by the suites."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness import gathered

Grads = dict[str, Tensor | None]


class Mlp(nn.Module):
    """Three layers of different sizes, for several buckets with a small cap."""

    def __init__(self, width: int = 8, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width, dtype=dtype)
        self.middle = nn.Linear(2 * width, 3 * width, dtype=dtype)
        self.last = nn.Linear(3 * width, width, bias=False, dtype=dtype)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class WithGradientIf(torch.autograd.Function):
    """A copy whose backward has a gradient only if `defined`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, defined: bool) -> Tensor:  # type: ignore[override]
        ctx.defined = defined
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad if ctx.defined else None, None


class Branches(nn.Module):
    """Each rank may take another branch; no rank uses `never`."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4, dtype=dtype)
        self.left = nn.Linear(4, 4, dtype=dtype)
        self.right = nn.Linear(4, 4, dtype=dtype)
        self.never = nn.Linear(4, 4, dtype=dtype)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return getattr(self, branch)(torch.tanh(self.trunk(x)))


class TwoHeads(nn.Module):
    """Two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4, dtype=torch.float64)
        self.left = nn.Linear(4, 4, dtype=torch.float64)
        self.right = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.trunk(x))
        return self.left(hidden), self.right(hidden)


class Recurrent(nn.GRU):
    """An RNN, which also keeps its weights in a list outside of `_parameters`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class NormNet(nn.Module):
    """A convolution net with batch norm: parameters and buffers of two dtypes."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, dtype=dtype)
        self.norm = nn.BatchNorm2d(4, dtype=dtype)
        self.head = nn.Linear(4, 2, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model that `make` builds with this seed."""
    torch.manual_seed(seed)
    return make()


def linears(count: int, width: int, **options: Any) -> nn.Sequential:
    """Layers of one size."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, **options) for _ in range(count)))


def reordered(module: nn.Module) -> nn.Module:
    """Register the first layer last. Layers are used in another order then, so buckets change after the first step."""
    module._modules["first"] = module._modules.pop("first")
    return module


def batch(rank: int, step: int = 0, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The batch of one rank in one step; each rank can compute those of the others."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    values = torch.randn(*(shape or (5, 8)), generator=generator, dtype=torch.float64)
    return values.to(dtype)


def loss_of(output: Any) -> Tensor:
    """A scalar that depends on each element of each tensor in the output."""
    if isinstance(output, Tensor):
        squared = output * output.conj()
        return squared.real.sum() if squared.is_complex() else squared.sum()
    values = output.values() if isinstance(output, dict) else output
    return sum((loss_of(value) for value in values), torch.zeros((), dtype=torch.float64))


def after_backward_of(module: nn.Module, look: Callable[[], Any]) -> None:
    """Call `look` in each backward, after that of the module, by a hook on its input, which the reducer can't see."""

    def watch(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0] if args[0].requires_grad else args[0].detach().requires_grad_()
        x.register_hook(lambda _grad: (look(), None)[1])
        return (x.clone(), *args[1:])  # the parameters' gradients come before that of x

    module.register_forward_pre_hook(watch)


def gradients_made(module: nn.Module) -> dict[str, int]:
    """By name, the address at which autograd allocates each gradient, from now on."""
    made: dict[str, int] = {}

    def look() -> None:
        made.update({name: p.grad.data_ptr() for name, p in module.named_parameters() if p.grad is not None})

    after_backward_of(module, look)
    return made


def grads_of(model: nn.Module) -> Grads:
    """Copies of all gradients by parameter name (without DDP's `module.` prefixes)."""
    return {
        name.replace("module.", ""): None if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
    }


def local_grads(model: nn.Module, run: Callable[[nn.Module], Any]) -> Grads:
    """The gradients of `run(model)` on a copy of the model, without any communication."""
    plain = copy.deepcopy(model)
    plain.zero_grad(set_to_none=True)
    run(plain)
    return grads_of(plain)


def mean_grads(per_rank: Iterable[Grads]) -> Grads:
    """DDP's expected result: the mean over the ranks; None where no rank has a gradient."""
    ranks = list(per_rank)
    mean: Grads = {}
    for name in ranks[0]:
        present = [dense(grad) for grads in ranks if (grad := grads[name]) is not None]
        mean[name] = torch.stack(present).sum(0) / len(ranks) if present else None
    return mean


def expected_grads(model: nn.Module, run: Callable[[nn.Module, int], Any], world_size: int | None = None) -> Grads:
    """The mean over all ranks of the gradients of `run(model, rank)`, computed locally."""
    ranks = range(dist.get_world_size() if world_size is None else world_size)
    return mean_grads(local_grads(model, lambda plain, rank=rank: run(plain, rank)) for rank in ranks)


def step_on(model: nn.Module, rank: int, step: int = 0, dtype: torch.dtype = torch.float64) -> None:
    """Forward and backward of an Mlp-like model on the batch of `rank`."""
    loss_of(model(batch(rank, step, dtype=dtype))).backward()


def train(model: nn.Module, rank: int, steps: int = 4, optimizer: Any = None, **zero_grad: bool) -> None:
    """Update the parameters of an Mlp-like model in each step; the last step's gradients stay."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad(**zero_grad)
        step_on(model, rank, step)
        optimizer.step()


def assert_grads(got: Grads, want: Grads, rtol: float = 1e-9, what: str = "") -> None:
    """Assert equal names, equal None entries, and values equal within `rtol` of the largest element (0: bitwise)."""
    assert got.keys() == want.keys(), f"{what} parameters {sorted(got)} instead of {sorted(want)}"
    for name, expected in want.items():
        actual = got[name]
        if expected is None or actual is None:
            both_missing = expected is None and actual is None
            assert both_missing, f"{what} gradient of '{name}' is {actual}, expected {expected}"
            continue
        assert actual.dtype == expected.dtype and actual.shape == expected.shape, (
            f"{what} gradient of '{name}' is {actual.dtype} {tuple(actual.shape)}, "
            f"expected {expected.dtype} {tuple(expected.shape)}"
        )
        a, b = dense(actual), dense(expected)
        if rtol == 0:
            assert torch.equal(a, b), f"{what} gradient of '{name}' differs: {a} instead of {b}"
            continue
        scale = b.abs().max().item() if b.numel() else 0.0
        error = (a - b).abs().max().item() if b.numel() else 0.0
        assert error <= rtol * scale, f"{what} gradient of '{name}' is off by {error:g} at scale {scale:g}"


def assert_steps(ddp: Any, rank: int, steps: Iterable[int], run: Callable[[Any, int, int], Any] = step_on) -> None:
    """In each step, `run(model, rank, step)` on `ddp` must give the mean of the ranks' local gradients."""
    for step in steps:
        ddp.zero_grad()
        want = expected_grads(ddp.module, lambda model, r, step=step: run(model, r, step))
        run(ddp, rank, step)
        assert_grads(grads_of(ddp), want, what=f"step {step}:")


def assert_trains(ddp: nn.Module, rank: int, width: int = 8, steps: Iterable[int] = range(3)) -> None:
    """Train an Mlp of this width; after each step its gradients must be the means over all ranks."""
    assert_steps(ddp, rank, steps, lambda model, r, step: loss_of(model(batch(r, step, 5, width))).backward())


def dense(value: Tensor) -> Tensor:
    """A dense copy of a sparse gradient; other gradients unchanged."""
    return value.to_dense() if value.is_sparse else value


def same_on_all_ranks(values: Iterable[Tensor]) -> bool:
    """Whether these tensors are bitwise equal on all ranks (collective)."""
    everywhere = [gathered(dense(value.detach()).clone()) for value in values]
    return all(torch.equal(of_ranks[0], other) for of_ranks in everywhere for other in of_ranks)


def whole(value: Tensor) -> Tensor:
    """A DTensor's full tensor (collective); other tensors unchanged."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_same_training(model: nn.Module, reference: nn.Module, rtol: float = 0.0) -> None:
    """Assert equal parameters and gradients; DTensors are gathered first."""
    sides = []
    for side in (model, reference):
        named = {name.removeprefix("module."): p for name, p in side.named_parameters()}
        sides.append({name: whole(p.detach()) for name, p in named.items()})
        sides[-1] |= {f"{name}.grad": p.grad if p.grad is None else whole(p.grad) for name, p in named.items()}
    assert_grads(*sides, rtol)


def storage_of(value: Tensor) -> int:
    """The address of a tensor's storage."""
    return value.untyped_storage().data_ptr()
