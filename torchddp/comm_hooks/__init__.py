"""Communication hooks that send compressed gradients. See docs/comm_hooks.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchddp.comm_hooks.composed import PerParameter, without_norms_and_biases
from torchddp.comm_hooks.elementwise import BF16, FP16, Cast, Int4, Int8
from torchddp.comm_hooks.hook import CommHook
from torchddp.comm_hooks.power_sgd import PowerSGD

__all__ = [
    "BF16",
    "FP16",
    "NAMES",
    "Cast",
    "CommHook",
    "Int4",
    "Int8",
    "PerParameter",
    "PowerSGD",
    "resolve",
    "without_norms_and_biases",
]

NAMES: dict[str, Callable[[], CommHook]] = {
    "fp16": FP16,
    "bf16": BF16,
    "int8": Int8,
    "int4": Int4,
    "powersgd": lambda: PowerSGD(clamp_rank=True),
}


def resolve(spec: object) -> tuple[object, Callable[..., Any]]:
    """The ``(state, hook)`` that ``register_comm_hook`` takes.

    Args:
        spec: a :class:`CommHook`; a name in ``NAMES`` (default options; "powersgd" uses smaller ranks for small
            matrices); a torch-style function ``hook(state, bucket)``; or a pair ``(state, function)``.

    Raises:
        ValueError: an unknown name.
        TypeError: anything else.
    """
    if isinstance(spec, str):
        if spec.lower() not in NAMES:
            raise ValueError(f"comm_hook must be one of {', '.join(map(repr, NAMES))} or a hook, got {spec!r}")
        return None, NAMES[spec.lower()]()
    if isinstance(spec, type) and issubclass(spec, CommHook):
        raise TypeError(f"comm_hook takes a hook, not its class: write {spec.__name__}()")
    if isinstance(spec, tuple) and len(spec) == 2 and callable(spec[1]):
        return spec[0], spec[1]
    if callable(spec):
        return None, spec
    raise TypeError(
        "comm_hook must be a name, a hook of torchddp.comm_hooks, a function (state, bucket) or a pair (state, hook), "
        f"got {spec!r}"
    )
