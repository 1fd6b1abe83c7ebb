"""The small examples train on two ranks under torchrun and on one without, and exit cleanly; all are listed."""

import contextlib
import importlib
import io
import re

import pytest
import torch

from examples import train_sharded
from examples.gpt.ranks import Ranks
from tests.harness import run_ranks
from tests.programs import ROOT, TORCHRUN, python
from torchddp import ParallelConfig

pytestmark = pytest.mark.beyond_torch("is not what the examples train with")


def assert_it_learned(output, most=0.4):
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", output, re.MULTILINE)]
    assert len(losses) >= 5 and losses[-1] < most * losses[0], output


@pytest.mark.slow
def test_two_ranks_under_torchrun():
    torchrun = (*TORCHRUN[1:], "--standalone", "--nproc-per-node", "2")
    done = python(*torchrun, "examples/train_parallelize.py", "ddp.bucket_cap_mb=1", "--steps", "60", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_it_learned(done.stdout)
    assert "steps reduced by torchddp: 60" in done.stdout
    assert "Traceback" not in done.stderr and "terminate called" not in done.stderr


def output_of(name, *arguments):
    """The output of rank 0 of two forked ranks of this example."""
    example = importlib.import_module(f"examples.{name}")

    def on_rank(rank):
        torch.set_num_threads(1)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            example.train(Ranks(rank, rank, 2, torch.device("cpu"), has_group=True), *arguments)
        return printed.getvalue()

    first, other = run_ranks(on_rank, 2)
    assert other == ""
    return first


SHARDS = ParallelConfig.from_file(ROOT / "examples" / "parallelize.toml")


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("train_plain", (60, 3e-3), ""),
        ("train_parallelize", (SHARDS, 60, 3e-3), "ShardedDataParallel"),
        ("train_diloco", (60, 3e-3, 10, "int8"), "synchronizations by torchddp: 6"),
        ("train_lora", (120, 3e-3), "frozen weights, changed: False"),
        ("train_growing", (120, 3e-3), "updates of the blocks: 120, 80, 40"),
        ("train_unfreezing", (120, 3e-3), "updates of the head: 120"),
    ],
)
def test_an_example_learns(name, arguments, words):
    output = output_of(name, *arguments)
    assert_it_learned(output, 1.0 if name == "train_unfreezing" else 0.4)
    assert words in output


def test_the_sharded_checkpoint_is_plain_adamws(tmp_path):
    path = tmp_path / "new" / "sharded.pt"
    assert_it_learned(output_of("train_sharded", 60, 3e-3, path))
    saved = torch.load(path)
    model = train_sharded.make_model()
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    assert all(optimizer.state[p]["step"] == 60 for p in model.parameters())


def test_the_list_of_examples_is_complete():
    listed = set(re.findall(r"examples[./](\w+)", (ROOT / "docs" / "first_run.md").read_text()))
    there = {path.stem for path in (ROOT / "examples").glob("train_*.py")}
    assert there and there <= listed <= {path.stem for path in (ROOT / "examples").iterdir()}
