"""The example of docs/parallelize.md runs, and every option is on the page."""

import dataclasses
import textwrap
from pathlib import Path

import pytest

from tests.harness import on_ranks
from torchddp.parallel import ParallelConfig

PAGE = Path(__file__).parents[2] / "docs" / "parallelize.md"
pytestmark = pytest.mark.beyond_torch("has no parallelize")


@on_ranks(2)
def test_the_example():
    lines = PAGE.read_text().split("`init_process_group`")[0].splitlines()
    code = textwrap.dedent("\n".join(line for line in lines if line.startswith("    ") or not line))
    names = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert type(names["model"]).__name__ == "FSDPSequential"
    assert float(names["loss"]) < 6.5  # 8 at the start: the variance of the sum of 8 numbers


def test_every_option_is_on_the_page():
    table = PAGE.read_text().split("## Options")[1].split("## Groups")[0]
    for field in dataclasses.fields(ParallelConfig):
        assert f"`{field.name}`" in table, field.name
