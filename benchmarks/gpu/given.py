"""A model with preset gradients, so that a step does nothing but packing and reducing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.large import large_from, packed_whole
from torchddp import DistributedDataParallel
from torchddp.ddp.options import TransportChoice

LARGER_THAN_ALL_MIB = 4096


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        # No other reference to it exists, so autograd keeps it as .grad without a copy.
        return ctx.gradient.clone(), None


class Given(nn.Module):
    """A model with one parameter per given gradient."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros_like(gradient) for gradient in gradients)
        self.gradients = list(gradients)

    def forward(self) -> Tensor:
        given = [_Give.apply(weight, grad) for weight, grad in zip(self.weights, self.gradients, strict=True)]
        return torch.stack(given).sum()


class GivenStep:
    """A backward pass of such a model in one bucket; averages are this rank's gradients over the divisor.

    The gradients are packed, or, with ``adopts``, reduced in place: over NCCL, or on the CPU over the process
    group. RuntimeError if they are not.
    """

    def __init__(
        self, gradients: Sequence[Tensor], *, divisor: int, adopts: bool = False, transport: TransportChoice = "auto"
    ) -> None:
        if adopts:
            transport = "nccl" if gradients[0].is_cuda else "c10d"
        with large_from(1), packed_whole():
            self.model = DistributedDataParallel(
                Given(gradients),
                bucket_cap_mb_list=[LARGER_THAN_ALL_MIB],
                gradient_as_bucket_view=None if adopts else True,  # views would lie in the bucket
                transport=transport,
            )
        if adopts:
            self._check_adopted()
        self.model.reducer.set_divisor(lambda: divisor)
        self._divisor = divisor

    def __call__(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.model().backward()

    def check(self, world_size: int) -> None:
        """Raises RuntimeError unless every gradient is correct."""
        self()
        for index, (weight, given) in enumerate(
            zip(self.model.module.weights, self.model.module.gradients, strict=True)
        ):
            if not torch.equal(weight.grad, given * (world_size / self._divisor)):
                raise RuntimeError(f"gradient {index} of {len(self.model.module.gradients)} is not what was packed")

    def offsets_bytes(self) -> list[int]:
        """Where the gradients begin in their buckets."""
        weights = self.model.module.weights
        return [
            offset * weights[param].element_size()
            for bucket in self.model.reducer.plan.buckets
            for param, offset in zip(bucket.params, bucket.offsets, strict=True)
        ]

    def _check_adopted(self) -> None:
        reducer, gradients = self.model.reducer, self.model.module.gradients
        if reducer.bucket_memory_bytes >= min(gradient.nbytes for gradient in gradients):
            raise RuntimeError(
                f"a bucket over {reducer.transport_name} has {reducer.bucket_memory_bytes} bytes of memory: gradients "
                "are packed into it, not reduced in place"
            )
