"""Communication hooks: gradients that travel compressed. See docs/comm_hooks.md."""

from torchddp.comm_hooks.cast_around import CastAround, cast_around_torch
from torchddp.comm_hooks.hook import CommHook
from torchddp.comm_hooks.power_sgd import PowerSGD
from torchddp.comm_hooks.quantized import BF16, FP16, Cast, Int4, Int8, Sign
from torchddp.comm_hooks.resolve import NAMES, resolve
from torchddp.comm_hooks.rules import PerParameter, without_norms_and_biases
from torchddp.comm_hooks.top_k import TopK

__all__ = [
    "BF16",
    "FP16",
    "NAMES",
    "Cast",
    "CastAround",
    "CommHook",
    "Int4",
    "Int8",
    "PerParameter",
    "PowerSGD",
    "Sign",
    "TopK",
    "cast_around_torch",
    "resolve",
    "without_norms_and_biases",
]
