"""The first step of a user's own model, without any wrapper: what is wrong with it is told in one sentence."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torchddp.harness.factory import one_line
from torchddp.harness.model_spec import run_forward
from torchddp.harness.models import find_model, make_batch, make_model
from torchddp.harness.variants import ArgumentError


def prove(name: str, seed: int) -> None:
    """One step; ArgumentError where it fails, or leaves a parameter without gradient."""
    model = make_model(name, seed)
    try:
        batch = make_batch(name, seed, dist.get_rank(), 0)
        loss = find_model(name, seed).loss(run_forward(model, batch))
    except Exception as error:  # the user's code may raise anything
        raise ArgumentError(
            f"--model {name}: a step of the bare model raised {type(error).__name__}: {one_line(error)}."
        ) from error
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ArgumentError(f"--model {name}: the loss is no scalar tensor that can be differentiated.")
    try:
        loss.backward()
    except Exception as error:
        raise ArgumentError(f"--model {name}: backward raised {type(error).__name__}: {one_line(error)}.") from error
    parameters = [(path, p) for path, p in model.named_parameters() if p.requires_grad]
    for path, parameter in parameters:
        if parameter.grad is None:
            raise ArgumentError(f"--model {name}: parameter '{path}' got no gradient: no DDP class would train it.")
        if parameter.grad.layout is not torch.strided:
            raise ArgumentError(f"--model {name}: parameter '{path}' has a sparse gradient, which is not timed here.")
    model.zero_grad(set_to_none=True)
