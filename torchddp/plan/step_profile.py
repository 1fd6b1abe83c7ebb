"""The measurements of a training step that planning and simulating need. Pure data, saved as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from torchddp.whole_file import parse_json

FORMAT = 1
_LONGEST_S = 1e9  # a century; sums and products stay finite


class ProfileError(ValueError):
    """A profile that can't be used; the message is one sentence for the user."""


@dataclass(frozen=True)
class Gradient:
    name: str
    numel: int
    itemsize: int
    # Opaque keys: only gradients with equal dtype and device share a bucket.
    dtype: int
    device: int
    sparse: bool
    # Seconds from the start of backward until the gradient is ready, on the slowest rank (median over steps).
    ready_s: float
    # As in `ParamSpec`; -1: all ranks get the average.
    owner: ClassVar[int] = -1

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class LinearCost:
    """The seconds that an all-reduce of n bytes takes on this group: `alpha_s + n * beta_s_per_byte` (Hockney 1994)."""

    alpha_s: float
    beta_s_per_byte: float
    # CPU time of a rank per byte and per message over TCP, which a faster link does not reduce.
    host_s_per_byte: float = 0.0
    host_s_per_message: float = 0.0
    # Copying gradients into a bucket that holds more than one.
    pack_s_per_byte: float = 0.0
    # Median relative distance of the measurements from the line.
    misfit: float = 0.0

    def seconds(self, nbytes: float) -> float:
        return self.alpha_s + nbytes * self.beta_s_per_byte


@dataclass(frozen=True)
class StepProfile:
    """A step of one model on one process group. Times in seconds, medians over steps, of the slowest rank."""

    model: str
    fingerprint: str  # a hash of the reduced parameters' names, sizes, dtypes and devices
    world_size: int
    ranks_per_host: int
    transport: str  # what carried the buckets: c10d, shm, nccl
    device: str
    gradients: tuple[Gradient, ...]  # in the order of registration
    order: tuple[int, ...]  # indices into gradients, as they became ready
    forward_s: float
    backward_s: float  # compute alone: no bucket was in flight
    cost: LinearCost
    buckets: tuple[tuple[int, ...], ...]  # the plan in use when step_s was measured: indices, in launch order
    step_s: float  # forward and backward with overlap, as measured with `buckets`
    torchddp_version: str
    torch_version: str
    backend: str = ""  # of the process group: gloo, nccl
    # The rest of a step: zeroing gradients, Python around the model, ranks that wait for each other.
    overhead_s: float = 0.0
    # How many times longer messages take in a step than when they are timed alone; already included in `cost`.
    message_slowdown: float = 1.0

    def __post_init__(self) -> None:
        """Check everything, because a file may contain anything."""
        count, indices = len(self.gradients), [index for bucket in self.buckets for index in bucket]
        own_s = (self.forward_s, self.backward_s, self.step_s, self.overhead_s, self.message_slowdown)
        times = (*own_s, *asdict(self.cost).values(), *self.ready_s)
        sizes = [size for g in self.gradients for size in (g.numel, g.itemsize, g.dtype, g.device)]
        counts = (self.world_size, self.ranks_per_host, *sizes, *self.order, *indices)
        own = (self.model, self.fingerprint, self.transport, self.device, self.backend)
        texts = (*own, self.torchddp_version, self.torch_version, *(gradient.name for gradient in self.gradients))
        if not all(isinstance(value, (int, float)) for value in times):
            raise ProfileError("The profile has a time that is not a number.")
        if not all(isinstance(value, int) and 0 <= value < 2**48 for value in counts):
            raise ProfileError("The profile has a size or an index that is not a number, below 0, or too large.")
        if not all(isinstance(text, str) and text.isprintable() for text in texts):
            raise ProfileError("The profile has a name that is not a printable text.")
        if count == 0 or sorted(self.order) != list(range(count)):
            raise ProfileError(f"The order of the profile is not a permutation of its {count} gradients.")
        if sorted(indices) != list(range(count)):
            raise ProfileError(f"The buckets of the profile do not hold each of its {count} gradients once.")
        if not all(0 <= value <= _LONGEST_S for value in times):
            raise ProfileError("The profile has a time that is negative, not finite, or too long.")
        itemsizes = {gradient.dtype: gradient.itemsize for gradient in self.gradients}
        for g in self.gradients:
            if itemsizes[g.dtype] != g.itemsize or not 1 <= g.itemsize <= 16 or max(g.dtype, g.device) >= 2**31:
                raise ProfileError("The profile has a gradient of an impossible dtype or device.")
            if not isinstance(g.sparse, bool):
                raise ProfileError("The profile has a gradient that is neither sparse nor dense.")
        if min(self.world_size, self.ranks_per_host) < 1:
            sizes_text = f"{self.world_size} ranks, {self.ranks_per_host} per host"
            raise ProfileError(f"The profile has {sizes_text}; both must be at least 1.")

    @property
    def ready_s(self) -> list[float]:
        return [gradient.ready_s for gradient in self.gradients]

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s + self.overhead_s

    @property
    def gradient_bytes(self) -> int:
        return sum(gradient.nbytes for gradient in self.gradients)

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "kind": "torchddp step profile", **asdict(self)}

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")


def profile_from_dict(data: object) -> StepProfile:
    if not isinstance(data, dict) or data.get("kind") != "torchddp step profile":
        raise ProfileError("This is not a step profile (record one with `torchddp tune --profile FILE`).")
    if data.get("format") != FORMAT:
        raise ProfileError(
            f"The profile has format {data.get('format')!r} (written by torchddp {data.get('torchddp_version')}), but "
            f"this torchddp reads format {FORMAT}: record it again with `torchddp tune --profile FILE`."
        )
    fields = {key: value for key, value in data.items() if key not in ("format", "kind")}
    try:
        fields["gradients"] = tuple(Gradient(**gradient) for gradient in fields["gradients"])
        fields["cost"] = LinearCost(**fields["cost"])
        fields["order"] = tuple(fields["order"])
        fields["buckets"] = tuple(tuple(bucket) for bucket in fields["buckets"])
        return StepProfile(**fields)
    except ProfileError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"The profile is damaged ({type(error).__name__}: {error}).") from error


def load_profile(path: Path) -> StepProfile:
    """Read a profile that `save` wrote; `ProfileError` in one sentence if that fails."""
    try:
        data = parse_json(path.read_text())
    except OSError as error:
        raise ProfileError(f"Cannot read the profile '{path}': {error.strerror}.") from error
    except ValueError as error:
        raise ProfileError(f"'{path}' is not JSON, as `torchddp tune --profile` writes: {error}.") from error
    try:
        return profile_from_dict(data)
    except ProfileError as error:
        raise ProfileError(f"'{path}': {error}") from error
