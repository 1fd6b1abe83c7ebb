"""What the command line asked for, and what each case makes of it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from torchddp.bench.cases import DEFAULT_WORLD_SIZES, QUICK_WORLD_SIZES, Case
from torchddp.harness.variants import Variant, make_variants

QUICK_SECONDS = 2.0


@dataclass(frozen=True)
class Settings:
    """What the command line asked for, checked. None and () leave it to the case."""

    cases: tuple[str, ...]
    models: tuple[str, ...]
    operations: tuple[str, ...]
    seconds: float | None
    world_size: int | None
    world_sizes: tuple[int, ...]
    caps_mb: tuple[float, ...] | None
    ours: str
    peers: tuple[str, ...]
    ours_tuned: bool
    quick: bool
    seed: int

    def models_of(self, case: Case) -> tuple[str, ...]:
        """The models to run for a case."""
        return self.models or (case.quick_models if self.quick else case.models)

    def seconds_of(self, case: Case) -> float:
        """Time for the timed rounds of each model or collective."""
        if self.seconds is not None:
            return self.seconds
        return QUICK_SECONDS if self.quick else case.seconds

    def world_size_of(self, case: Case) -> int:
        """Number of ranks of a launch."""
        return self.world_size or case.default_world_size

    def scaling_world_sizes(self) -> tuple[int, ...]:
        """Numbers of ranks of the case scaling."""
        return self.world_sizes or (QUICK_WORLD_SIZES if self.quick else DEFAULT_WORLD_SIZES)

    def variants_of(self, case: Case) -> tuple[Variant, ...]:
        """The field of a case."""
        # Bucket size hardly matters for memory, where each row is a launch of its own.
        if self.caps_mb is not None and case.name != "memory":
            caps_mb = self.caps_mb
        else:
            # With --quick the smallest and torch's own.
            caps_mb = case.caps_mb[::2] if self.quick else case.caps_mb
        return make_variants(self.ours, self.peers, caps_mb, ours_tuned=self.ours_tuned)
