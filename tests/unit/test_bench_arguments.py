"""The commands in benchmarks/ refuse a wrong argument with exit code 2 and one sentence that names it."""

import importlib
import importlib.util
import itertools
import os
import shutil

import pytest
import torch

from benchmarks.two_hosts import network
from tests.unit.helpers import assert_refused
from torchddp.harness.variants import TORCH_DDP


def main_of(benchmark: str):
    return importlib.import_module(f"benchmarks.{benchmark}.cli").main


REFUSED = {
    "chaos checks gpu host_model links sharded two_hosts": ["--json /"],
    "convergence slow_link": ["--output /"],
    "convergence host_model slow_link": ["--plot /"],
    "checks gpu links sharded two_hosts": ["--seconds 0"],
    "checks gpu links two_hosts": ["--model nope"],
    "checks gpu": ["--world-size 0"],
    "gpu links two_hosts": ["--out /etc/passwd", "--caps x"],
    "links slow_link two_hosts": ["--rate fast", "--rate 1gbit --rate 200gbit"],
    "chaos": ["--trials 0", "--trials 5 --only 5", "--kinds kill,flood", "--world-sizes 2,5"],
    "checks": ["--every 0"],
    "convergence": ["--task imagenet", "--seeds 0", "--methods magic"],
    "gpu": ["--part nope", "--device tpu", "--backend mpi", "--sequence 1"],
    "host_model": ["--ranks 1", "--nodes 0", "--bytes 0", "--counts /nowhere"],
    "sharded": ["--output /etc/passwd", "--models nope", "--variants nope", "--ranks 1", "--ranks x"],
    "slow_link": ["--ranks-per-host 0", "--steps 1", "--methods magic", "--show /nowhere/x.json"],
    "two_hosts": ["--ours no_such_package.Thing"],
}


@pytest.mark.parametrize("benchmarks", REFUSED)
def test_a_wrong_argument_is_one_sentence_that_names_it(benchmarks, capsys):
    """The sentence quotes the wrong value, or names the option if the value is a number."""
    for benchmark, case in itertools.product(benchmarks.split(), REFUSED[benchmarks]):
        *_, option, value = arguments = case.split()
        assert_refused(main_of(benchmark), arguments, option if value.isdigit() else value.split(",")[-1], capsys)


@pytest.mark.parametrize(
    ("benchmark", "arguments", "words"),
    [
        ("chaos", "--over ,", "--over must be some of shm, gloo, torchft, separated by commas, not ','."),
        ("chaos", "--kinds full --over gloo", "No fault of kind full works over gloo."),
        ("convergence", "--methods int8,magic", "--methods: there is no 'magic'; choose from uncompressed"),
        ("gpu", "--device cpu", "NCCL does not support CPU tensors: use --backend gloo with --device cpu."),
        ("links", "--rate fast", "--rate must be 10mbit to 100gbit, like 500mbit or 2.5gbit, not 'fast'."),
        ("sharded", "--models ,", "--models must be names separated by commas, like "),
        ("sharded", "--ranks x", "--ranks must be numbers separated by commas, like 2,4, not 'x'."),
        ("two_hosts", "--bogus", "; see python -m benchmarks.two_hosts --help."),
    ],
)
def test_the_sentence_says_which_values_are_allowed(benchmark, arguments, words, capsys):
    assert_refused(main_of(benchmark), arguments.split(), words, capsys)


def test_a_missing_package_or_gpu_is_reported_in_one_sentence(monkeypatch, capsys):
    for benchmark, arguments, words in (
        ("chaos", "--over torchft", "--over torchft needs torchft, which is not installed here."),
        ("convergence", "--task digits", "--task digits needs scikit-learn: pip install scikit-learn, or --task gpt."),
        ("gpu", "", "; --device cpu runs the program without one."),
    ):
        main = main_of(benchmark)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert_refused(main, arguments.split(), words, capsys)


def test_a_file_of_another_benchmark_is_refused(tmp_path, capsys):
    for benchmark, text, words in (
        ("convergence", '{"results": [{"case": "links"}]}', "holds results of links, not convergence"),
        ("slow_link", '{"results": []}', "holds results of nothing, not slow_link"),
        ("host_model", '{"ranks": 2}', "KeyError 'nodes'"),
    ):
        path = tmp_path / "some.json"
        path.write_text(text)
        option = "--counts" if benchmark == "host_model" else "--show"
        assert_refused(main_of(benchmark), [option, str(path)], words, capsys)


def test_the_emulated_network_needs_root_ip_and_tc(monkeypatch, capsys):
    for user, missing, command, words in (
        (1000, "", [], "as root."),
        (0, "ip", [], "'ip' was not found"),
        (0, "", ["/nowhere/ip"], "Cannot build the emulated network: "),
        (0, "", ["sh", "-c", "echo Operation not permitted. >&2; exit 2"], "said: Operation not permitted."),
    ):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        monkeypatch.setattr(shutil, "which", {"ip": "/sbin/ip", "tc": "/sbin/tc", missing: None}.get)
        monkeypatch.setattr(network, "setup_commands", lambda hosts, rate, command=command: [command])
        assert_refused(main_of("two_hosts"), ["--ours", TORCH_DDP], words, capsys)
