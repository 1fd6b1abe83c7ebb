"""The commands in benchmarks/: a wrong argument gives exit code 2 and one sentence that names it."""

import importlib
import importlib.util
import os
import shutil

import pytest

from tests.unit.helpers import assert_refused
from torchddp.harness.variants import TORCH_DDP


def main_of(benchmark: str):
    return importlib.import_module(f"benchmarks.{benchmark}.cli").main


@pytest.mark.parametrize(
    ("benchmark", "arguments", "words"),
    [
        ("chaos", "--trials 5 --only 5", "--only must be a trial's number, 0 to 4, not 5"),
        ("checks", "--every 0", "--every must be at least 1"),
        ("compress", "--format int9", "no format 'int9'"),
        ("convergence", "--methods int8,magic", "--methods: there is no 'magic'; choose from uncompressed"),
        ("gpu", "--part nope", "There is no part 'nope'; choose from models, pack,"),
        ("host_model", "--ranks 1", "--ranks must be 2 to 256, not 1."),
        ("links", "--rate fast", "--rate must be"),
        ("sharded", "--variants nothing", "--variants: there is no 'nothing'"),
        ("slow_link", "--show /nowhere/x.json", "--show: '/nowhere/x.json' is not the JSON of a run"),
        ("two_hosts", "--bogus", "; see python -m benchmarks.two_hosts --help."),
    ],
)
def test_a_wrong_argument_is_one_sentence(benchmark, arguments, words, capsys):
    assert_refused(main_of(benchmark), arguments.split(), words, capsys)


def test_digits_need_scikit_learn(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert_refused(main_of("convergence"), ["--task", "digits"], "needs scikit-learn", capsys)


@pytest.mark.parametrize(("user", "missing", "words"), [(1000, "", "as root."), (0, "ip", "'ip' was not found")])
def test_the_network_needs_root_and_programs(user, missing, words, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == missing else f"/sbin/{name}")
    assert_refused(main_of("two_hosts"), ["--ours", TORCH_DDP], words, capsys)
