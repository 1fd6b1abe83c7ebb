"""What a program keeps of its gradients, and does with ``.grad``: the same values as with torch DDP, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.harness import on_ranks, run_ranks
from tests.models import batch, loss_of, seeded
from tests.parity.compare import TorchDDP
from tests.whole_buckets import LargeApart, WholeBuckets

WIDTH = 600  # a weight of 1.4 MB, which lies alone in its bucket and is not copied


class Mixed(nn.Module):
    """Large and small parameters, one that each rank uses in some steps only, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, WIDTH)
        self.large = nn.Linear(WIDTH, WIDTH)
        self.outlet = nn.Linear(WIDTH, 3)
        self.sometimes = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, more: bool) -> Tensor:
        y = self.outlet(torch.relu(self.large(torch.tanh(self.inlet(x))))) * self.scale
        return self.sometimes(y) if more else y


Params = list[nn.Parameter]
Kept = list[Tensor]


Action = Callable[[Params, Kept], object]


def _keep(what: Callable[[Tensor], Tensor]) -> Action:
    return lambda params, kept: kept.extend(what(p.grad) for p in params if p.grad is not None)


def _each(change: Callable[[nn.Parameter], object]) -> Action:
    """Of every parameter that has a gradient."""
    return lambda params, kept: [change(p) for p in params if p.grad is not None]


def _assign(params: Params, kept: Kept) -> None:
    """The program's own flat memory for gradients, as some optimizers have it."""
    flat = torch.ones(sum(p.numel() for p in params))
    kept.append(flat)
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = part.view_as(p)


def _project(params: Params, kept: Kept) -> None:
    """Gradients of two tasks, one made orthogonal to what was kept of the other (PCGrad)."""
    for p in params:
        mine = [k for k in kept if p.grad is not None and k.shape == p.grad.shape]
        if mine and p.grad is not None:
            p.grad.sub_(mine[-1] * 0.125)


ACTIONS: dict[str, Action] = {
    "keep": _keep(lambda g: g),
    "keep one": lambda params, kept: _keep(lambda g: g)(params[2:3], kept),
    "keep view": _keep(lambda g: g.flatten()[1:]),
    "keep detached": _keep(lambda g: g.detach()),
    "keep data": _keep(lambda g: g.data),
    "keep numpy": _keep(lambda g: torch.from_numpy(g.numpy())),
    "to none": _each(lambda p: setattr(p, "grad", None)),
    "half to none": lambda params, kept: [setattr(p, "grad", None) for p in params[::2]],
    "to zero": _each(lambda p: p.grad.zero_()),
    "assign": _assign,
    "replace": _each(lambda p: setattr(p, "grad", p.grad * 0.5)),
    "swap data": _each(lambda p: setattr(p.grad, "data", p.grad.data + 1)),
    "edit": _each(lambda p: p.grad.mul_(0.5).add_(0.25)),
    "clip": lambda params, kept: nn.utils.clip_grad_norm_(params, 0.1),
    "step": lambda params, kept: torch.optim.SGD(params, lr=0.01, momentum=0.9).step(),
    "project": _project,
}

# With what stands in the place of the class under test, if anything.
OPTIONS: list[tuple[Any, dict[str, Any]]] = [
    (None, {"transport": "shm"}),
    (None, {"transport": "c10d"}),
    (None, {"transport": "shm", "bucket_cap_mb": 0.001}),
    (None, {"transport": "c10d", "bucket_cap_mb": 25}),
    (None, {"transport": "shm", "find_unused_parameters": True}),
    (None, {"transport": "c10d", "find_unused_parameters": True}),
    (None, {"gradient_as_bucket_view": False}),
    (WholeBuckets, {"transport": "c10d"}),
    (WholeBuckets, {"transport": "shm", "bucket_cap_mb": 0.001}),
    (LargeApart, {"transport": "c10d", "bucket_cap_mb": 0.001}),
]

programs = st.lists(st.lists(st.sampled_from(sorted(ACTIONS)), max_size=4), min_size=3, max_size=5)


def _check(kept: tuple[Kept, Kept], models: tuple[nn.Module, nn.Module], what: str) -> None:
    for (name, got), want in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(got, want), f"{what}: parameter {name}"
        assert (got.grad is None) == (want.grad is None), f"{what}: {name}.grad is {got.grad}, not {want.grad}"
        if got.grad is not None:
            off = (got.grad - want.grad).abs().max()
            assert torch.equal(got.grad, want.grad), f"{what}: {name}.grad is off by {off}"
    for index, (mine, theirs) in enumerate(zip(*kept, strict=True)):
        assert torch.equal(mine, theirs), f"{what}: kept tensor {index} of shape {tuple(mine.shape)} has changed"


def _keep_in_hooks(model: nn.Module, kept: Kept) -> None:
    for index, p in enumerate(model.parameters()):
        if index % 2:
            p.register_hook(lambda grad: kept.append(grad))
        else:
            p.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))


@pytest.mark.slow
@given(st.sampled_from([1, 2, 2, 3]), programs, st.sampled_from(OPTIONS), st.booleans(), st.booleans())
def test_whatever_a_program_does_with_grad(ddp_class, world_size, program, choice, hooks, accumulate):
    own_class, options = choice

    def work(rank):
        inner = (seeded(Mixed), seeded(Mixed))
        kept: tuple[Kept, Kept] = ([], [])
        if hooks:
            for model, mine in zip(inner, kept, strict=True):
                _keep_in_hooks(model, mine)
        search = {k: v for k, v in options.items() if k in ("bucket_cap_mb", "find_unused_parameters")}
        ddps = ((own_class or ddp_class)(inner[0], **options), TorchDDP(inner[1], **search))
        for step, actions in enumerate(program):
            for ddp in ddps:
                more = not options.get("find_unused_parameters") or (rank + step) % 3 == 0
                if accumulate:
                    with ddp.no_sync():
                        loss_of(ddp(batch(rank, 2 * step + 1, 2, 4, dtype=torch.float32), more)).backward()
                loss_of(ddp(batch(rank, 2 * step, 2, 4, dtype=torch.float32), more)).backward()
            if world_size > 2:  # ranks are summed in another order: from here on, as if it had been the same
                _level(inner, kept)
            _check(kept, inner, f"step {step}")
            for name in actions:
                for model, mine in zip(inner, kept, strict=True):
                    with torch.no_grad():
                        ACTIONS[name](list(model.parameters()), mine)
                _check(kept, inner, f"step {step}, after '{name}' of {actions}")

    run_ranks(work, world_size)


def _level(inner: tuple[nn.Module, nn.Module], kept: tuple[Kept, Kept]) -> None:
    pairs = [(a.grad, b.grad) for a, b in zip(*(m.parameters() for m in inner), strict=True) if a.grad is not None]
    for mine, theirs in [*pairs, *zip(*kept, strict=True)]:
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        mine.copy_(theirs)


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_gradients_kept_from_every_step(ddp_class, transport, rank):
    """More of them than the transport has memory for."""
    ours, theirs = ddp_class(seeded(Mixed), transport=transport), TorchDDP(seeded(Mixed))
    kept: list[list[Tensor]] = [[], []]
    for step in range(12):
        for ddp, mine in zip((ours, theirs), kept, strict=True):
            ddp.zero_grad()
            loss_of(ddp(batch(rank, step, 2, 4, dtype=torch.float32), True)).backward()
            mine.extend(p.grad for p in ddp.parameters())
    for index, (got, want) in enumerate(zip(*kept, strict=True)):
        assert torch.equal(got, want), f"gradient {index}"


@on_ranks(2)
def test_nothing_is_copied_where_nothing_is_kept(ddp_class, rank):
    """The view of a gradient is the same tensor in every step: no memory, no Python object is made."""
    ddp = ddp_class(seeded(Mixed), bucket_cap_mb=25, transport="c10d")
    seen = []
    for step in range(5):
        ddp.zero_grad()
        loss_of(ddp(batch(rank, step, 2, 4, dtype=torch.float32), True)).backward()
        seen.append([(id(p.grad), p.grad.data_ptr()) for p in ddp.parameters() if p.nbytes < 2**20])
    assert seen[2] == seen[3] == seen[4]
