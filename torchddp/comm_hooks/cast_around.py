"""16 bits around another hook."""

# Annotations are no strings here: torch's register_comm_hook() compares those of hooks with the types themselves.

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from torchddp.comm_hooks.hook import CommHook, Setup
from torchddp.comm_hooks.layout import Piece

__all__ = ["CastAround", "cast_around_torch"]

_FORMATS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class CastAround(CommHook):
    """What ``inner`` gets is rounded to ``dtype``, and the exact sums that it sends travel in 16 bits.

    As torch's ``fp16_compress_wrapper`` and ``bf16_compress_wrapper``, but sums stay in fp32. So PowerSGD's P and Q
    take half the bytes; quantisers send what they send anyway. For hooks of torch, see :func:`cast_around_torch`.

    Args:
        inner: a hook of torchddp.comm_hooks.
        dtype: ``torch.float16`` or ``torch.bfloat16``.

    Raises:
        TypeError: ``inner`` is no such hook.
        ValueError: another dtype.
    """

    def __init__(self, inner: CommHook, dtype: torch.dtype = torch.float16) -> None:
        if not isinstance(inner, CommHook):
            raise TypeError(f"CastAround takes a hook of torchddp.comm_hooks, got {inner!r}; see cast_around_torch()")
        super().__init__(hierarchical=inner.hierarchical, timeout=inner.timeout)
        self.inner = inner
        self.dtype = _checked(dtype)

    def _setup(self, setup: Setup) -> None:
        self.inner._setup(replace(setup, sum_format=_FORMATS[self.dtype]))

    def _follow(self, lead: int) -> None:
        self.inner._follow(lead)

    def _reduce(self, piece: Piece) -> None:
        piece.flat.copy_(piece.flat.to(self.dtype))
        self.inner._reduce(piece)

    def _state(self) -> dict[str, Any]:
        return {"inner": {"hook": type(self.inner).__name__, **self.inner._state()}}

    def _load_state(self, state: Mapping[str, Any]) -> None:
        if state["inner"]["hook"] != type(self.inner).__name__:
            raise ValueError(
                f"this is the state of CastAround around {state['inner']['hook']}, not {type(self.inner).__name__}"
            )
        self.inner._load_state(state["inner"])


def cast_around_torch(
    hook: Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]], dtype: torch.dtype = torch.float16
) -> Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """A hook of torch's kind that gives ``hook`` the bucket in ``dtype``, and casts the result back.

    torch's own wrappers do this too; this one also takes bfloat16 on CPU models.

    Raises:
        ValueError: a dtype that is neither ``torch.float16`` nor ``torch.bfloat16``.
    """
    _checked(dtype)

    def cast_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        whole = bucket.buffer()
        bucket.set_buffer(whole.to(dtype))

        def back(future: torch.futures.Future[Any]) -> torch.Tensor:
            value = future.value()
            return whole.copy_(value[0] if isinstance(value, list | tuple) else value)

        return hook(state, bucket).then(back)

    return cast_hook


def _checked(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _FORMATS:
        raise ValueError(f"dtype must be torch.float16 or torch.bfloat16, got {dtype!r}")
    return dtype
