"""The field on a GPU: as on a CPU, without the options that the running torch does not know."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Sequence

from torchddp.harness.variants import TORCHDDP, Role, Variant, load_class, make_variants


def known_options(variant: Variant, parameters: Collection[str]) -> Variant:
    """The variant without options that are none of the constructor's parameters."""
    kept = tuple((name, value) for name, value in variant.options if name in parameters)
    return dataclasses.replace(variant, options=kept)


def make_field(ours: str, caps_mb: Sequence[float]) -> tuple[Variant, ...]:
    """No DDP, torch default and tuned at each cap, ours by default and with torch's tuned options at the same caps.

    A torch that has no `batched_grad_copy` yet is tuned with what it has.
    """
    field = []
    for variant in make_variants(ours, (), caps_mb):
        if variant.role is Role.TORCH and variant.class_path is not None:
            variant = known_options(variant, inspect.signature(load_class(variant.class_path)).parameters)
        field.append(variant)
    if ours == TORCHDDP:
        # What our default costs beyond the promise that the graph never changes, which torch's tuned rows make.
        field.append(Variant("torchddp static_graph", Role.OURS, ours, (("static_graph", True),)))
    return tuple(field)
