"""Runs the class under test and torch's own side by side, in the same ranks, and compares every gradient.

At world sizes 1 and 2 results are bitwise equal: the sum of two numbers does not depend on their order, and dividing by
a power of two is exact. With 3 or more ranks, gloo's ring adds in an order that depends on an element's position in the
bucket, and the two classes may lay out buckets differently, so the last bits may differ.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.models import Grads, assert_grads, grads_of, seeded

# Relative to the largest element of the gradient: a few roundings in the dtype that is sent.
RTOL = {
    torch.float64: 1e-14,
    torch.complex128: 1e-14,
    torch.float32: 1e-6,
    torch.complex64: 1e-6,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}

Run = Callable[[nn.Module, int, int], None]  # (model, rank, step): any number of forwards and backwards


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


def assert_same_as_torch(
    ddp_class: type,
    make: Callable[[], nn.Module],
    run: Run,
    steps: int = 3,
    rtol: float | None = None,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> None:
    """Train both classes from the same seeds; gradients in each step and the final models must be equal (collective).

    Bitwise for up to two ranks, unless `rtol` is given.
    """
    limit = rtol if rtol is not None else 0.0 if dist.get_world_size() <= 2 else RTOL[dtype]
    rank = dist.get_rank()
    theirs, their_model = train(TorchDDP, make, run, rank, steps, **settings)
    ours, our_model = train(ddp_class, make, run, rank, steps, **settings)
    for step in range(steps):
        assert_grads(ours[step], theirs[step], limit, what=f"rank {rank}, step {step}:")
    for what in ("named_parameters", "named_buffers"):
        want = {name: value.detach() for name, value in getattr(their_model.module, what)()}
        got = {name: value.detach() for name, value in getattr(our_model.module, what)()}
        assert_grads(got, want, 100 * limit, what=f"rank {rank}, {what} at the end:")
