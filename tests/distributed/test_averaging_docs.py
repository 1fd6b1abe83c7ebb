"""The example of docs/averaging.md runs, and does what the page says."""

from tests.averaging import assert_same_on_all_ranks
from tests.harness import on_ranks
from tests.pages import run_code


@on_ranks(2)
def test_the_example(rank):
    names = run_code("averaging.md")
    assert names["optimizer"].steps == 200
    assert_same_on_all_ranks(names["model"])
    assert float(names["loss"]) < 8.0  # 16 at the start: the variance of the sum of 16 numbers
    assert 0 < names["optimizer"].traffic.wire_bytes < names["optimizer"].traffic.payload_bytes / 3
