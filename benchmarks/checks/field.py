"""What is timed side by side. Imports no torch."""

from __future__ import annotations

from torchddp.harness.variants import LOCAL, TORCHDDP, Role, Variant

MODELS = ("mlp", "gpt", "small", "conv")
DEFAULT_MODELS = ("mlp", "gpt", "small")
PLAIN = "plain"
# The same once more: how far two rows are apart that do the same.
AGAIN = "plain again"
# With a check before every step, so that each round has one.
CHECKED = "check_parameters_every=1"


def make_field() -> tuple[Variant, ...]:
    """The model alone, our class (which has hang reports), and our class with each check, without those reports, with
    weights."""

    def ours(name: str, **options: object) -> Variant:
        return Variant(name, Role.OURS, TORCHDDP, tuple(options.items()))

    return (
        LOCAL,
        ours(PLAIN),
        ours(AGAIN),
        ours(CHECKED, check_parameters_every=1),
        ours("find_nonfinite=True", find_nonfinite=True),
        ours('find_nonfinite="raise"', find_nonfinite="raise"),
        ours("no hang reports", stall_report_s=0),
        Variant("weigh()", Role.OURS, "benchmarks.checks.weighted.Weighted"),
    )
