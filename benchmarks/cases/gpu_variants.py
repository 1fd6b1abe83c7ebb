"""The variants of the case `gpu` beside those of `torchddp bench`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from torchddp import DistributedDataParallel
from torchddp.bench.cases import Job
from torchddp.harness.variants import TORCH_DDP, TORCHDDP, TUNED_OPTIONS, Role, Variant, load_class
from torchddp.transport.agreement import backend_of

# torch reads it whenever it allocates buckets; "1" is its default.
REGISTERED_ENV = "DDP_DISABLE_COMM_MEM"


@functools.cache
def registers(device: torch.device) -> bool:
    """Whether torch has registered memory for buckets on this device: it has to support multicast."""
    assert dist.group.WORLD is not None
    backend = backend_of(dist.group.WORLD, device.type)
    if backend is None or not backend.supports_tensor_alloc(device):
        return False
    try:
        backend.allocate_tensor(1, dtype=torch.float32, device=device)
    except RuntimeError as error:  # of the driver, in a container without the rights, say
        warnings.warn(f"no registered buckets: {error}", stacklevel=2)
        return False
    return True


@contextlib.contextmanager
def _registered(device: torch.device) -> Iterator[None]:
    if not registers(device):
        yield
        return
    before = os.environ.get(REGISTERED_ENV)
    os.environ[REGISTERED_ENV] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[REGISTERED_ENV]
        else:
            os.environ[REGISTERED_ENV] = before


class RegisteredBuckets(TorchDDP):
    """torch's class with buckets in memory that NCCL allocates and registers, where it can."""

    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
        with _registered(self.device):
            super()._ddp_init_helper(*args, **kwargs)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # The second forward allocates the buckets anew, in the order of the first backward.
        with contextlib.nullcontext() if self._has_rebuilt_buckets else _registered(self.device):
            return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]


class Halving(DistributedDataParallel):
    """Ours with a divisor of two, so that NCCL launches a kernel for each large gradient, also for one rank."""

    divisor = 2

    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
        super()._ddp_init_helper(*args, **kwargs)
        self.reducer.set_divisor(lambda: self.divisor)


def path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def known_options(variant: Variant) -> Variant:
    """Without the options that the class of this torch lacks."""
    if variant.class_path is None:
        return variant
    parameters = inspect.signature(load_class(variant.class_path)).parameters
    return replace(variant, options={name: value for name, value in variant.options.items() if name in parameters})


def torch_lacks() -> list[str]:
    """The options of torch's best that this torch does not have."""
    known = inspect.signature(load_class(TORCH_DDP)).parameters
    return [name for name in TUNED_OPTIONS if name not in known]


def field_of(job: Job) -> tuple[Variant, ...]:
    """Also ours with static_graph, which torch's tuned rows use, and without reducing large gradients in place.

    Over NCCL also torch's tuned rows with registered buckets, and for one rank ours with a kernel of NCCL's.
    """
    variants = [known_options(variant) if variant.role is Role.TORCH else variant for variant in job.variants]
    if job.backend == "nccl":
        tuned = [variant for variant in variants if variant.role is Role.TORCH and variant.options.get("static_graph")]
        variants += [
            replace(variant, name=variant.name.replace("tuned", "registered"), class_path=path_of(RegisteredBuckets))
            for variant in tuned
        ]
    variants += [
        Variant("torchddp static_graph", Role.OURS, TORCHDDP, {"static_graph": True}),
        Variant("torchddp all packed", Role.OURS, TORCHDDP, {"gradient_as_bucket_view": True}),
    ]
    if job.backend == "nccl" and job.world_size == 1:
        variants.append(Variant("torchddp, NCCL halves", Role.OURS, path_of(Halving)))
    return tuple(variants)
