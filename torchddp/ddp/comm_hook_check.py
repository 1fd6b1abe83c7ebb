"""Checks on Python communication hooks: when they are registered, and on what they return."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Hook = Callable[[Any, Any], Any]


def check_hook_signature(hook: object) -> None:
    """Raise TypeError or ValueError unless ``hook(state, bucket)`` can be called and its annotations, if any, fit."""
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable. Got {type(hook).__name__}.")
    try:
        # Annotations are strings where the hook's file imports them from __future__.
        signature = inspect.signature(hook, eval_str=True)
    except (NameError, TypeError, AttributeError, SyntaxError):
        signature = inspect.signature(hook)
    try:
        bound = signature.bind("state", "bucket")
    except TypeError as error:
        raise TypeError(f"Communication hook must be callable as hook(state, bucket): {error}.") from error
    bucket = signature.parameters.get("bucket") or signature.parameters[list(bound.arguments)[-1]]
    if bucket.annotation not in (inspect.Parameter.empty, dist.GradBucket) and not isinstance(bucket.annotation, str):
        raise ValueError(f"Communication hook: bucket annotation should be dist.GradBucket. Got {bucket.annotation!r}.")
    returned = signature.return_annotation
    if returned not in (inspect.Signature.empty, torch.futures.Future[torch.Tensor]) and not isinstance(returned, str):
        raise ValueError(
            f"Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. Got {returned!r}."
        )


def checked(hook: Hook, rank: int) -> Hook:
    """``hook`` with its return value checked: the engine can only wait for a torch future."""

    @functools.wraps(hook)
    def call(state: Any, bucket: Any) -> Any:
        future = hook(state, bucket)
        if not isinstance(future, torch._C.Future):  # the base of torch.futures.Future: what Work.get_future() gives
            raise RuntimeError(  # torch's type
                f"Communication hook {getattr(hook, '__qualname__', hook)!r} returned {type(future).__name__} for "
                f"bucket {bucket.index()} on rank {rank}: it must return a torch.futures.Future that holds one tensor."
            )
        return future

    return call
