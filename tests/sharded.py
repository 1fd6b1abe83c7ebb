"""A sharded model and optimizer compared with torch's DDP and the plain optimizer on the same batches."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchddp
from tests.models import seeded
from tests.oss import Twins
from torchddp.optim import OSS

WIDTH = 16
# One layer's gradient is large enough for its own bucket (256 KiB over shared memory, 1 MiB through gloo).
LARGE = 520


class Net(nn.Module):
    """Small layers, a norm, a large layer, and a layer of another dtype."""

    def __init__(self, large: int = LARGE) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, large)
        self.norm = nn.LayerNorm(large)
        self.middle = nn.Linear(large, large)
        self.conv = nn.Conv1d(1, 3, 3, padding=1)
        self.last = nn.Linear(large, 5, bias=False)
        self.wide = nn.Linear(5, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.norm(self.first(x)))))
        hidden = self.conv(hidden[:, None]).mean(1)
        return self.wide(self.last(hidden).double())


def small_net() -> Net:
    return Net(large=24)


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@dataclass
class Pair(Twins):
    """The same model twice: sharded, and trained by torch's class."""

    rank: int = field(default_factory=dist.get_rank)

    def backward(self, step: int) -> None:  # type: ignore[override]
        for model, _ in self.sides():
            loss_of(model(batch_of(self.rank, step))).backward()

    def step(self, **zero_grad: Any) -> None:
        """Step both optimizers after a backward."""
        for _, optimizer in self.sides():
            optimizer.step()
            optimizer.zero_grad(**zero_grad)

    def train(self, steps: range, **zero_grad: Any) -> None:
        for step in steps:
            self.backward(step)
            self.step(**zero_grad)

    def rewrap(self) -> None:
        """Wrap the reference again, as is necessary after parameters were frozen or thawed."""
        transport = self.model.reducer.transport_name
        self.reference = reference_of(self.reference.module, {"transport": transport}, {})

    def assert_equal(self, rtol: float = 0.0, atol: float = 0.0) -> None:
        """Assert equal parameters, by default bitwise; over gloo the summation order of three or more ranks varies."""
        ranks = dist.get_world_size(self.model.process_group)
        if self.model.reducer.transport_name == "c10d" and ranks > 2:
            rtol, atol = max(rtol, 1e-4), max(atol, 1e-5)
        super().assert_equal(rtol, atol)

    def assert_sharded(self) -> None:
        """Assert after a backward that only owners have gradients."""
        for name, param in self.model.module.named_parameters():
            if param.requires_grad:
                assert (param.grad is not None) == (self.oss.param_to_rank[param] == self.rank), name


def make_pair(
    optim: type[torch.optim.Optimizer] = torch.optim.AdamW,
    options: dict[str, Any] | None = None,
    make: Callable[[], nn.Module] = Net,
    groups: Callable[[nn.Module], Any] = lambda model: model.parameters(),
    reference_options: dict[str, Any] | None = None,
    oss_options: dict[str, Any] | None = None,
    device: torch.device | str = "cpu",
    **sharded_options: Any,
) -> Pair:
    """Make a pair (collective). The reference uses the same transport, so that sums have the same order."""
    one, other = seeded(make).to(device), seeded(make).to(device)
    oss = OSS(groups(one), optim, **(oss_options or {}), **(options or {"lr": 0.01}))
    plain = optim(groups(other), **(options or {"lr": 0.01}))
    sharded = torchddp.ShardedDataParallel(one, oss, **sharded_options)
    return Pair(sharded, oss, reference_of(other, sharded_options, reference_options), plain)


def reference_of(module: nn.Module, sharded_options: dict[str, Any], options: dict[str, Any] | None) -> nn.Module:
    """torch's class for up to two ranks, whose sums have only one order; ours for more, over the same transport."""
    options = dict(options or {})
    if "find_unused_parameters" in sharded_options:
        options["find_unused_parameters"] = sharded_options["find_unused_parameters"]
    if dist.get_world_size() <= 2:
        return TorchDDP(module, **options)
    return torchddp.DistributedDataParallel(module, transport=sharded_options.get("transport", "auto"), **options)
