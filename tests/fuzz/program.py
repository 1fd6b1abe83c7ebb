"""A random training program as plain data: the model, the options, and the lines of each step.

Programs with the same repr are equal: all randomness of a run is derived from `Program.key`.
"""

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, repr=False)
class Part:
    """A part of the model with its own parameters and output. Prints only what differs from the defaults."""

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

    def __repr__(self) -> str:
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Part({', '.join(shown)})"


@dataclass(frozen=True)
class Program:
    key: str
    world_size: int
    transport: str
    parts: tuple[Part, ...]
    backend: str = "gloo"  # of our process group; torch's class has gloo's
    options: dict[str, Any] = field(default_factory=dict)
    comm_hook: str = "none"
    tensor_hooks: str = "none"
    output: str = "tensor"
    seeds_differ: bool = True  # ranks start with different parameters
    optimizer: str = "torch.optim.SGD(trained(), lr=0.05)"
    steps: tuple[tuple[str, ...], ...] = ()  # lines, with the names of tests.fuzz.side.Side

    def text(self) -> str:
        """A multi-line description for people."""
        names = ("world_size", "transport", "backend", "options", "comm_hook", "tensor_hooks", "output", "seeds_differ")
        lines = [" ".join(f"{name}={getattr(self, name)}" for name in names), f"  optimizer: {self.optimizer}"]
        lines += [f"  part {i}: {part!r}" for i, part in enumerate(self.parts)]
        for i, step in enumerate(self.steps):
            lines += [f"  step {i}:", *(f"    {text}" for line in step for text in line.splitlines())]
        return "\n".join(lines)
