"""A random training program as plain data: the model, the options, and the operations of each step.

Programs with the same repr are equal: all randomness of a run is derived from `Program.key`.
"""

from dataclasses import dataclass, field, fields
from typing import Any


class _Short:
    """Prints only what differs from the defaults."""

    def __repr__(self) -> str:
        shown = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)  # type: ignore[arg-type]
            if getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Part(_Short):
    """A part of the model with its own parameters and output."""

    kind: str  # a key of tests.fuzz.model.KINDS
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    layout: str = "contiguous"  # or transposed, channels_last, gaps
    sparse: bool = False
    frozen: bool = False
    ignored: bool = False  # _ddp_params_and_buffers_to_ignore
    tied_to: int | None = None  # index of an earlier part whose parameter this part shares
    calls: int = 1  # uses per forward
    used: str = "always"  # a key of tests.fuzz.model.USES
    in_loss: bool = True  # False: its output is not in the loss


@dataclass(frozen=True, repr=False)
class Train(_Short):
    """Forward and backward."""

    micro: int = 0
    sync: bool = True  # False: under no_sync()
    how: str = "plain"  # a method of tests.fuzz.side.Side without its train_ prefix
    autocast: bool = False


@dataclass(frozen=True, repr=False)
class Do(_Short):
    """Anything else: `Do("edit", "clip_norm")` is `Side.edit_clip_norm()`, or else `Side.edit("clip_norm")`."""

    what: str
    how: str = ""

    def __repr__(self) -> str:
        return f"{self.what}({self.how})"


Op = Train | Do


@dataclass(frozen=True, repr=False)
class Optimizer(_Short):
    kind: str = "SGD"
    momentum: float = 0.0
    foreach: bool | None = None


@dataclass(frozen=True, repr=False)
class Program(_Short):
    key: str
    world_size: int
    transport: str
    parts: tuple[Part, ...]
    options: dict[str, Any] = field(default_factory=dict)
    comm_hook: str = "none"
    tensor_hooks: str = "none"
    output: str = "tensor"
    seeds_differ: bool = True  # ranks start with different parameters
    optimizer: Optimizer = Optimizer()
    steps: tuple[tuple[Op, ...], ...] = ()

    def text(self) -> str:
        """A multi-line description for people."""
        lines = [f"world_size={self.world_size} transport={self.transport} options={self.options}"]
        rest = {f.name: getattr(self, f.name) for f in fields(self)[6:-1] if getattr(self, f.name) != f.default}
        lines += [f"  {name}: {value}" for name, value in rest.items()]
        if self.comm_hook != "none":
            lines.append(f"  comm_hook: {self.comm_hook}")
        lines += [f"  part {i}: {part!r}" for i, part in enumerate(self.parts)]
        lines += [f"  step {i}: " + ", ".join(map(repr, ops)) for i, ops in enumerate(self.steps)]
        return "\n".join(lines)
