"""Two models side by side, one with OSS and one with the plain optimizer, which must stay bitwise equal."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import keystr, tree_flatten_with_path

import torchddp
from tests.harness import gathered
from tests.models import Mlp, batch, loss_of, seeded
from torchddp.optim import OSS

float_mlp = partial(Mlp, dtype=torch.float32)


@dataclass
class Twins:
    """The same wrapped model twice: with OSS, and with the plain optimizer."""

    model: Any
    oss: OSS
    reference: Any
    plain: torch.optim.Optimizer

    def sides(self) -> list[tuple[Any, Any]]:
        return [(self.model, self.oss), (self.reference, self.plain)]

    def backward(self, step: int, same_batch: bool = False) -> None:
        """Compute averaged gradients on both models. With the same batch on all ranks nothing is averaged, so that the
        gradients are bitwise equal for any number of ranks.
        """
        rank = 0 if same_batch else dist.get_rank()
        for ddp, optimizer in self.sides():
            optimizer.zero_grad()
            model = ddp.module if same_batch else ddp
            loss_of(model(batch(rank, step, dtype=torch.float32))).backward()

    def train(self, steps: range, **options: Any) -> None:
        for step in steps:
            self.backward(step, **options)
            self.oss.step()
            self.plain.step()

    def train_alike(self, steps: range, rtol: float = 0.0, atol: float = 0.0) -> None:
        self.train(steps)
        self.assert_equal(rtol, atol)

    def assert_equal(self, rtol: float = 0.0, atol: float = 0.0) -> None:
        torch.testing.assert_close(
            list(self.model.parameters()), list(self.reference.parameters()), rtol=rtol, atol=atol
        )


def twins(
    optim: type[torch.optim.Optimizer] = torch.optim.AdamW,
    options: dict[str, Any] | None = None,
    groups: Callable[[torch.nn.Module], Any] = lambda model: model.parameters(),
    make: Callable[[], torch.nn.Module] = float_mlp,
    **oss_options: Any,
) -> Twins:
    models = [seeded(make), seeded(make)]
    oss = OSS(groups(models[0]), optim, **oss_options, **copy.deepcopy(options or {}))
    plain = optim(groups(models[1]), **copy.deepcopy(options or {}))
    wrapped = [torchddp.DistributedDataParallel(model) for model in models]
    return Twins(wrapped[0], oss, wrapped[1], plain)


def weights(*shapes: Any, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]


def whole_state(oss: OSS) -> dict[str, Any]:
    """The consolidated state, on all ranks (collective)."""
    oss.consolidate_state_dict(0)
    return gathered(oss.state_dict() if oss.rank == 0 else None)[0]


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": list(model.first.parameters()), "lr": 0.02},
        {"params": [*model.middle.parameters(), *model.last.parameters()]},
    ]


def assert_same_state(mine: Any, other: Any) -> None:
    """Assert the same keys and bitwise equal values."""
    leaves, others = ({keystr(path): leaf for path, leaf in tree_flatten_with_path(one)[0]} for one in (mine, other))
    assert leaves.keys() == others.keys(), leaves.keys() ^ others.keys()
    for path, value in others.items():
        got = leaves[path]
        same = torch.equal(got, value) and got.dtype == value.dtype if torch.is_tensor(value) else got == value
        assert type(got) is type(value) and same, path
