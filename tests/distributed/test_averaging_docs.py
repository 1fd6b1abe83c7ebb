"""The example of docs/averaging.md runs, and does what the page says."""

import textwrap
from pathlib import Path

import torch.distributed as dist

from tests.averaging import assert_same_on_all_ranks
from tests.harness import on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "averaging.md"


@on_ranks(2)
def test_the_example(rank):
    lines = PAGE.read_text().split("## Methods")[0].splitlines()
    code = textwrap.dedent("\n".join(line for line in lines if line.startswith("    ") or not line))
    code = code.replace('dist.init_process_group("gloo")\n', "")

    names = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert names["optimizer"].steps == 200
    assert_same_on_all_ranks(names["model"])
    assert float(names["loss"]) < 8.0  # 16 at the start: the variance of the sum of 16 numbers
    assert 0 < names["optimizer"].traffic.wire_bytes < names["optimizer"].traffic.payload_bytes / 3
    assert dist.get_world_size() == 2
