"""The example of docs/fault_tolerance.md runs."""

import textwrap
from pathlib import Path

from tests.harness import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "fault_tolerance.md"


def test_the_example_of_fail_together():
    section = PAGE.read_text().split("## An exception on one rank ends all")[1].split("A rank that raises")[0]
    code = "\n".join(line for line in section.splitlines() if line.startswith("    ") or not line)
    code = textwrap.dedent(code).replace('dist.init_process_group("gloo")\n', "")

    def work(rank):
        names = {}
        exec(compile(code, str(PAGE), "exec"), names)
        return names["step"], float(names["loss"])

    assert [step for step, _ in run_ranks(work, 2)] == [19, 19]
