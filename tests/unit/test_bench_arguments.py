"""The commands in benchmarks/: a wrong argument is one sentence that names it, and exit code 2."""

import importlib
import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.two_hosts import network
from tests.unit.helpers import assert_refused
from torchddp.harness.variants import TORCH_DDP

WRONG = {
    "chaos": [
        (["--trials", "0"], "--trials wants a positive number, not 0"),
        (["--kinds", "kill,flood"], "not 'flood'"),
        (["--over", ""], "--over wants some of shm, gloo, torchft"),
        (["--world-sizes", "5"], "--world-sizes wants some of 2, 3, 4"),
        (["--trials", "5", "--only", "5"], "--only wants a trial's number, 0 to 4, not 5"),
        (["--kinds", "full", "--over", "gloo"], "No fault of kind full works over gloo"),
    ],
    "checks": [
        (["--model", "none"], "no model 'none'"),
        (["--every", "0"], "--every wants 1 or more"),
        (["--world-size", "0"], "--world-size wants 1"),
    ],
    "compress": [
        (["--format", "int9"], "no format 'int9'"),
        (["--kib", "0"], "--kib wants 1 to"),
        (["--top-k", "0"], "--top-k wants a share"),
        (["--rounds", "0"], "--rounds wants at least 1"),
        (["--output", "."], "--output wants a file"),
    ],
    "convergence": [
        (["--task", "imagenet"], "--task: there is no 'imagenet'; choose from gpt, digits, all"),
        (["--seeds", "0"], "--seeds wants 1 to 20, not 0"),
        (["--methods", "int8,magic"], "--methods: there is no 'magic'; choose from uncompressed"),
        (["--plot", "/nowhere/x.png"], "--plot: the folder '/nowhere' does not exist"),
    ],
    "gpu": [
        (["--part", "nope"], "There is no part 'nope'; choose from models, pack,"),
        (["--device", "tpu"], "There is no device 'tpu'"),
        (["--backend", "mpi"], "There is no backend 'mpi'"),
        (["--device", "cpu"], "use --backend gloo with --device cpu."),
        (["--sequence", "1"], "--sequence wants 16 to 8192 tokens, not 1."),
    ],
    "host_model": [(["--ranks", "1"], "--ranks wants 2 to 256, not 1.")],
    "links": [
        (["--model", "nothing"], "There is no model 'nothing'"),
        (["--rate", "fast"], "--rate wants"),
        (["--seconds", "0"], "--seconds"),
        (["--caps", "x"], "--caps wants"),
        (["--json", "/nowhere/x.json"], "folder '/nowhere' does not exist"),
    ],
    "sharded": [
        (["--models", "nothing"], "--models: there is no 'nothing'"),
        (["--models", ","], "--models wants names"),
        (["--variants", "nothing"], "--variants: there is no 'nothing'"),
        (["--ranks", "1"], "--ranks wants 2 to"),
        (["--ranks", "x"], "--ranks wants numbers"),
    ],
    "slow_link": [
        (["--ranks-per-host", "0"], "--ranks-per-host wants 1 to 8, not 0"),
        (["--steps", "1"], "--steps wants 5 to"),
        (["--methods", "magic"], "--methods: there is no 'magic'; choose from torch-ddp"),
        (["--show", "/nowhere/x.json"], "--show: '/nowhere/x.json' is not the JSON of a run"),
    ],
    "two_hosts": [
        (["--rate", "fast"], "not 'fast'."),
        (["--model", "nope"], "There is no model 'nope'; choose from small, mlp, gpt, conv."),
        (["--ours", "no_such_package.Thing"], "Cannot import 'no_such_package'"),
        (["--bogus"], "; see python -m benchmarks.two_hosts --help."),
    ],
}


def main_of(benchmark: str):
    return importlib.import_module(f"benchmarks.{benchmark}.cli").main


@pytest.mark.parametrize(
    ("benchmark", "arguments", "words"), [(name, *case) for name, cases in WRONG.items() for case in cases]
)
def test_a_wrong_argument_is_one_sentence(benchmark, arguments, words, capsys):
    assert_refused(main_of(benchmark), arguments, words, capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_benchmark_says_so(capsys):
    assert_refused(main_of("gpu"), [], "--device cpu runs the program without one.", capsys)


def test_without_scikit_learn_the_digits_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert_refused(main_of("convergence"), ["--task", "digits"], "needs scikit-learn", capsys)


def test_counts_of_another_shape_are_refused(tmp_path: Path, capsys):
    counts = tmp_path / "counts.jsonl"
    counts.write_text('{"ranks": 2}')
    assert_refused(main_of("host_model"), ["--counts", str(counts)], "KeyError 'nodes'", capsys)


@pytest.mark.parametrize(("user", "missing", "words"), [(1000, "", "as root."), (0, "ip", "'ip' was not found")])
def test_without_root_or_programs_there_is_no_network(user, missing, words, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == missing else f"/sbin/{name}")
    assert_refused(main_of("two_hosts"), ["--ours", TORCH_DDP], words, capsys)


def test_what_the_kernel_refuses_is_quoted(monkeypatch, capsys):
    monkeypatch.setattr(network, "check_supported", lambda: None)
    refusal = ["sh", "-c", "echo RTNETLINK answers: Operation not permitted. >&2; exit 2"]
    monkeypatch.setattr(network, "setup_commands", lambda hosts, rate: [refusal])
    words = "said: RTNETLINK answers: Operation not permitted."
    assert_refused(main_of("two_hosts"), ["--ours", TORCH_DDP], words, capsys)
