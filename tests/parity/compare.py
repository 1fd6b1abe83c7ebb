"""Runs the class under test and torch's own side by side, in the same ranks, and compares every gradient.

At world sizes 1 and 2 results are bit for bit the same: the sum of two numbers does not depend on their order, and a
division by a power of two is exact. From 3 ranks on, gloo's ring adds in an order that depends on where in the bucket
an element lies, and the two classes may lay out their buckets differently: there the last bits may differ.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.models import Grads, assert_grads, grads_of, seeded

# Relative to the largest element of the gradient: a handful of roundings in the dtype that travels.
RTOL = {
    torch.float64: 1e-14,
    torch.complex128: 1e-14,
    torch.float32: 1e-6,
    torch.complex64: 1e-6,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}

Run = Callable[[nn.Module, int, int], None]  # (model, rank, step): forward and backward, as often as it likes


def train(
    ddp_class: type,
    make: Callable[[], nn.Module],
    run: Run,
    rank: int,
    steps: int,
    *,
    options: dict[str, Any] | None = None,
    prepare: Callable[[nn.Module], None] | None = None,
    set_to_none: bool = True,
    optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer] | None = None,
) -> tuple[list[Grads], nn.Module]:
    """Gradients after each step, and the model at the end."""
    torch.manual_seed(0)
    ddp = ddp_class(seeded(make), **(options or {}))
    if prepare is not None:
        prepare(ddp)
    stepper = None if optimizer is None else optimizer(ddp.parameters())
    seen = []
    for step in range(steps):
        ddp.zero_grad(set_to_none=set_to_none)
        run(ddp, rank, step)
        seen.append(grads_of(ddp))
        if stepper is not None:
            stepper.step()
    return seen, ddp


def compare_on_rank(
    rank: int, ddp_class: type, make: Any, run: Any, steps: int, rtol: float, settings: dict[str, Any]
) -> None:
    """Trains both classes in this process group and asserts what `assert_same_as_torch` says."""
    theirs, their_model = train(TorchDDP, make, run, rank, steps, **settings)
    ours, our_model = train(ddp_class, make, run, rank, steps, **settings)
    for step in range(steps):
        assert_grads(ours[step], theirs[step], rtol, what=f"rank {rank}, step {step}:")
    for what in ("named_parameters", "named_buffers"):
        want = {name: value.detach() for name, value in getattr(their_model.module, what)()}
        got = {name: value.detach() for name, value in getattr(our_model.module, what)()}
        assert_grads(got, want, 100 * rtol, what=f"rank {rank}, {what} at the end:")


def assert_same_as_torch(
    ddp_class: type,
    make: Callable[[], nn.Module],
    run: Run,
    steps: int = 3,
    rtol: float | None = None,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> None:
    """Collective. Trains both classes from the same seeds: equal gradients in each step and an equal model at the end.

    Bit for bit up to two ranks, unless `rtol` says otherwise.
    """
    limit = rtol if rtol is not None else 0.0 if dist.get_world_size() <= 2 else RTOL[dtype]
    compare_on_rank(dist.get_rank(), ddp_class, make, run, steps, limit, settings)
