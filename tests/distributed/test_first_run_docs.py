"""The tutorials docs/first_run.md and docs/tune_buckets.md: programs print what the pages show."""

import re

import pytest
import torch

from examples.gpt.processes import torchrun
from scripts.docs_hooks import ROOT, blocks

pytestmark = pytest.mark.beyond_torch("tutorials of torchddp")


def code_of(page, language):
    return [block.code for block in blocks((ROOT / "docs" / page).read_text()) if block.language == language]


def test_the_first_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (program,), (_, printed) = code_of("first_run.md", "python"), code_of("first_run.md", "text")
    (tmp_path / "train.py").write_text(program)
    with (tmp_path / "log").open("w+") as log:
        torchrun(tmp_path / "train.py", [], ranks=2, timeout_seconds=100, output=log, errors=log)
        log.seek(0)
        text = log.read()
    # Not by line: under torchrun Python writes a line and its end separately, so lines of two ranks mix.
    said = sorted(re.findall(r"rank \d, step \d+: loss \d+\.\d{3}|weights saved; .* over shm", text))
    losses, promised = re.compile(r"loss ([\d.]+)"), sorted(printed.splitlines())
    assert [losses.sub("", line) for line in said] == [losses.sub("", line) for line in promised]
    found, wanted = ([float(value) for value in losses.findall("\n".join(text))] for text in (said, promised))
    assert found == pytest.approx(wanted, rel=0.05, abs=0.02)  # other processors may add in another order
    assert torch.load("model.pt", weights_only=True).keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_the_model_to_tune():
    page = "tune_buckets.md"
    factory, *uses = code_of(page, "python")
    names = {}
    exec(compile(factory, page, "exec"), names)
    module, batch = names["make"]()
    assert module(batch).shape == (64, 10)
    parameters = list(module.parameters())
    mb = sum(p.numel() * p.element_size() for p in parameters) / 1e6
    _, tuned = code_of(page, "text")
    assert tuned.startswith(f"make_model:make: {len(parameters)} gradients, {mb:.2f} MB, 2 ranks")
    assert len(uses) == 2  # test_docs_blocks.py runs them
