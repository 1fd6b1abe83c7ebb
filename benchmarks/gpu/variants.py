"""The variants on a GPU: those of the CPU, without options that a class does not accept."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Sequence

from benchmarks.gpu.cases import Way
from torchddp.harness.variants import (
    LOCAL,
    TORCH_DDP,
    TORCHDDP,
    TUNED_OPTIONS,
    Role,
    Variant,
    load_class,
    make_variants,
)


def parameters_of(class_path: str) -> Collection[str]:
    """The parameters of this class's constructor."""
    return inspect.signature(load_class(class_path)).parameters


def known_options(variant: Variant, parameters: Collection[str]) -> Variant:
    """The variant without the options that the constructor does not accept."""
    kept = tuple((name, value) for name, value in variant.options if name in parameters)
    return dataclasses.replace(variant, options=kept)


def torch_lacks() -> list[str]:
    """The tuned rows' options that this torch lacks."""
    return [name for name in TUNED_OPTIONS if name not in parameters_of(TORCH_DDP)]


def make_field(ours: str, caps_mb: Sequence[float]) -> tuple[Variant, ...]:
    """No DDP, torch default and tuned at each cap, ours by default and with torch's tuned options at the same caps.

    A torch without `batched_grad_copy` is tuned with the options that it has.
    """
    field = []
    for variant in make_variants(ours, (), caps_mb):
        if variant.role is Role.TORCH and variant.class_path is not None:
            variant = known_options(variant, parameters_of(variant.class_path))
        field.append(variant)
    if ours == TORCHDDP:
        # Shows what our default costs over static_graph, which torch's tuned rows use.
        field.append(Variant("torchddp static_graph", Role.OURS, ours, (("static_graph", True),)))
        field.append(Variant("torchddp all packed", Role.OURS, ours, (("adopt_large_gradients", False),)))
    return tuple(field)


def field_of(way: Way) -> tuple[Variant, ...]:
    """No DDP, torch's class tuned as far as this way of training allows, and ours by default."""
    tuned = tuple(TUNED_OPTIONS.items()) + way.options
    if dict(way.options).get("find_unused_parameters"):  # static_graph makes it unnecessary
        tuned = tuple(option for option in tuned if option[0] != "static_graph")
    torch_tuned = known_options(Variant("torch tuned", Role.TORCH, TORCH_DDP, tuned), parameters_of(TORCH_DDP))
    return LOCAL, torch_tuned, Variant("torchddp default", Role.OURS, TORCHDDP, way.options)
