"""The variants to compare: which class, with which options. Imports torch only to load a class."""

from __future__ import annotations

import importlib
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARY = Path(sysconfig.get_path("stdlib"))
TORCH_DDP = "torch.nn.parallel.DistributedDataParallel"
TORCHDDP = "torchddp.DistributedDataParallel"
DEFAULT_CAPS_MB: tuple[float, ...] = (1, 5, 25, 100)
# The options that make torch DDP fastest on these models; bucket_cap_mb is swept on top of them.
TUNED_OPTIONS: dict[str, Any] = {"gradient_as_bucket_view": True, "batched_grad_copy": True, "static_graph": True}


class ArgumentError(ValueError):
    """The command line asks for something impossible; the message is one sentence for the user."""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def describe_error(error: BaseException) -> str:
    """Type and message of an error; if it passed through the user's code, the innermost line of that code too."""
    said = f"{type(error).__name__}: {one_line(error)}"
    if isinstance(error, SyntaxError) and error.filename and error.text:
        place = f"{error.filename}:{error.lineno}: {error.text.strip()}"
        return f"{type(error).__name__}: {error.msg}, at {place}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    if not frames:
        return said
    return f"{said}, at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line or frames[-1].name}"


def _is_users(filename: str) -> bool:
    """Whether a file belongs neither to torchddp, nor to Python, nor to an installed package."""
    path = Path(filename)
    installed = "site-packages" in path.parts or "dist-packages" in path.parts or filename.startswith("<")
    return not (installed or path.is_relative_to(_PACKAGE) or path.is_relative_to(_LIBRARY))


class Role(str, Enum):
    LOCAL = "local"  # the model without any wrapper: what a step costs on its own
    TORCH = "torch"  # a candidate for 'torch's best'
    OURS = "ours"  # the class under test
    PEER = "peer"  # any other class, from --vs


@dataclass(frozen=True)
class Variant:
    name: str
    role: Role
    class_path: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


LOCAL = Variant("no DDP", Role.LOCAL)


def load_class(path: str) -> type:
    module_name, _, class_name = path.rpartition(".")
    if not module_name or not class_name:
        raise ArgumentError(f"'{path}' is not a dotted path to a class, like {TORCH_DDP}.")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # an extension that does not load raises more than ImportError
        hint = " (build it with `make build`)" if module_name.partition(".")[0] == "torchddp" else ""
        raise ArgumentError(f"Cannot import '{module_name}', needed for '{path}': {one_line(error)}{hint}.") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise ArgumentError(f"Module '{module_name}' has no class named '{class_name}'.")
    return found


def _tuned(name: str, role: Role, class_path: str, caps_mb: Iterable[float]) -> list[Variant]:
    return [
        Variant(f"{name} tuned, cap {cap:g}", role, class_path, {**TUNED_OPTIONS, "bucket_cap_mb": cap})
        for cap in caps_mb
    ]


def make_variants(
    ours: str,
    peers: Sequence[str],
    caps_mb: Sequence[float],
    *,
    ours_tuned: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> tuple[Variant, ...]:
    """No DDP, torch default and tuned at each cap, ours, and each peer. `extra`: options for every wrapper."""
    label = "torchddp" if ours == TORCHDDP else "under test"
    variants = [LOCAL, Variant("torch default", Role.TORCH, TORCH_DDP)]
    variants += _tuned("torch", Role.TORCH, TORCH_DDP, caps_mb)
    variants.append(Variant(f"{label} default", Role.OURS, ours))
    if ours_tuned:
        variants += _tuned(label, Role.OURS, ours, caps_mb)
    seen: dict[str, int] = {}
    for path in peers:
        # Peers with the same class name are numbered, to tell their rows apart.
        short_name = ".".join((path.partition(".")[0], path.rpartition(".")[2]))
        seen[short_name] = seen.get(short_name, 0) + 1
        suffix = f" ({seen[short_name]})" if seen[short_name] > 1 else ""
        variants.append(Variant(f"vs {short_name}{suffix}", Role.PEER, path))
    return tuple(v if v.class_path is None else replace(v, options={**v.options, **(extra or {})}) for v in variants)
