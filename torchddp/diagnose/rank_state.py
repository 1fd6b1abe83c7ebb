"""What a rank says of itself when ranks are asked why a reduction does not end."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torchddp.diagnose.stacks import Frame

# Of `alive`, beside 'running': as another rank sees the process; '' if none could look.
STOPPED, GONE = "stopped", "gone"


@dataclass
class RankState:
    """One rank at one moment. All but the first three are empty for a rank that has not answered.

    Attributes:
        who: its process (`processes.identity`), or None if it never said.
        left: why it takes part no more, if it said so.
        step: synchronised forwards begun.
        phase: 'idle', 'forward', 'backward' or 'waiting'; '' if it has not answered.
        armed: its forward has ended and gradients are to be reduced.
        waits_for, bucket, waited_s: what it waits in, of which bucket (-1: none), for how many seconds.
        missing: by bucket index, the parameters without a gradient in this step.
        backward: 'none', 'running', 'ended' or 'failed'.
        error: what its reducer's last failed step said.
        exception: `last_exception.last()` of the thread that trains; stack: of that thread.
        digest, parameters: of the names, shapes and dtypes of its parameters; the list only where ranks may differ.
    """

    rank: int
    who: dict[str, Any] | None = None
    left: str = ""
    alive: str = ""
    step: int = 0
    phase: str = ""
    armed: bool = False
    waits_for: str = ""
    bucket: int = -1
    num_buckets: int = 0
    waited_s: float = 0.0
    missing: dict[int, list[str]] = field(default_factory=dict)
    backward: str = "none"
    backward_error: str = ""
    error: str = ""
    exception: dict[str, Any] | None = None
    stack: list[Frame] = field(default_factory=list)
    digest: str = ""
    parameters: list[str] | None = None

    @property
    def answered(self) -> bool:
        return bool(self.phase)

    @property
    def waits(self) -> bool:
        return self.phase == "waiting"

    def to_json(self) -> dict[str, Any]:
        """Of types that JSON has."""
        return {**asdict(self), "missing": {str(i): names for i, names in self.missing.items()}}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankState:
        return cls(
            **{
                **values,
                "missing": {int(i): names for i, names in values["missing"].items()},
                "stack": [Frame(*frame) for frame in values["stack"]],
            }
        )


def from_status(rank: int, status: dict[str, Any]) -> RankState:
    """The part that a reducer knows: of its ``status()``."""
    missing = {i: bucket["missing"] for i, bucket in enumerate(status["buckets"]) if bucket["missing"]}
    same = {name: value for name, value in status.items() if name != "buckets"}
    return RankState(rank, missing=missing, **same)
