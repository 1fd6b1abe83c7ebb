"""The variants that are timed side by side. Imports no torch."""

from __future__ import annotations

from torchddp.harness.variants import LOCAL, TORCHDDP, Role, Variant

MODELS = ("mlp", "gpt", "small", "conv")
DEFAULT_MODELS = ("mlp", "gpt", "small")
PLAIN = "plain"
# The same variant again: the difference between the two rows is noise.
AGAIN = "plain again"
# Checks before every step, so that each round includes a check.
CHECKED = "check_parameters_every=1"


def make_field() -> tuple[Variant, ...]:
    """The bare model, and our class: default (with hang reports), with each check, without hang reports, weighted."""

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
