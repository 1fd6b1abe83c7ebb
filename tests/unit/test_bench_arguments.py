"""The commands in benchmarks/: a wrong argument is one sentence that names it, and exit code 2."""

import importlib
import importlib.util
import os
import shutil

import pytest
import torch

from benchmarks.two_hosts import network
from tests.unit.helpers import assert_refused
from torchddp.harness.variants import TORCH_DDP


def main_of(benchmark: str):
    return importlib.import_module(f"benchmarks.{benchmark}.cli").main


# Each of these benchmarks, its arguments, and words of the sentence.
WRONG = [
    ("chaos checks gpu host_model links sharded two_hosts", "--json /", "--json wants a file, and '/' is a folder"),
    ("compress convergence slow_link", "--output /", "--output wants a file, and '/' is a folder"),
    ("convergence host_model slow_link", "--plot /nowhere/x.png", "--plot: the folder '/nowhere' does not exist"),
    ("gpu links two_hosts", "--out /etc/passwd", "--out wants a folder, and '/etc/passwd' is a file"),
    ("sharded", "--output /etc/passwd", "--output wants a folder, and '/etc/passwd' is a file"),
    ("checks gpu links two_hosts", "--model nope", "There is no model 'nope'; choose from "),
    ("checks gpu links sharded two_hosts", "--seconds 0", "--seconds wants a number above 0 and up to 3600, not 0."),
    ("checks gpu", "--world-size 0", "--world-size wants 1 to 64 ranks, not 0."),
    ("gpu links two_hosts", "--caps x", "--caps wants numbers of MiB"),
    (
        "links slow_link two_hosts",
        "--rate fast",
        "--rate wants 10mbit to 100gbit, like 500mbit or 2.5gbit, not 'fast'.",
    ),
    ("links", "--rate 1gbit --rate 200gbit", "--rate wants 10mbit to 100gbit, "),
    ("convergence slow_link", "--methods int8,magic", "--methods: there is no 'magic'; choose from "),
    ("chaos", "--trials 0", "--trials wants a positive number, not 0"),
    ("chaos", "--trials 5 --only 5", "--only wants a trial's number, 0 to 4, not 5"),
    ("chaos", "--kinds kill,flood", "--kinds wants some of kill, stop, "),
    ("chaos", "--over ,", "--over wants some of shm, gloo, torchft, separated by commas, not ','"),
    ("chaos", "--world-sizes 2,5", "--world-sizes wants some of 2, 3, 4, separated by commas, not '5'"),
    ("chaos", "--kinds full --over gloo", "No fault of kind full works over gloo."),
    ("checks", "--every 0", "--every wants 1 or more"),
    ("compress", "--format int9", "There is no format 'int9'; choose from "),
    ("compress", "--kib 1 --kib 0", "--kib wants 1 to 4194304, not 0"),
    ("compress", "--kib 4194305", "--kib wants 1 to 4194304, not 4194305"),
    ("compress", "--top-k 0", "--top-k wants a share above 0 and at most 1, not 0"),
    ("compress", "--rounds 0", "--rounds wants at least 1, not 0"),
    ("convergence", "--task imagenet", "--task: there is no 'imagenet'; choose from gpt, digits, all"),
    ("convergence", "--seeds 0", "--seeds wants 1 to 20, not 0"),
    ("gpu", "--part nope", "There is no part 'nope'; choose from models, pack,"),
    ("gpu", "--device tpu", "There is no device 'tpu'; choose from "),
    ("gpu", "--backend mpi", "There is no backend 'mpi'; choose from "),
    ("gpu", "--device cpu", "use --backend gloo with --device cpu."),
    ("gpu", "--sequence 1", "--sequence wants 16 to 8192 tokens, not 1."),
    ("host_model", "--ranks 1", "--ranks wants 2 to 256, not 1."),
    ("host_model", "--nodes 0", "--nodes wants 1 to 256, not 0."),
    ("host_model", "--bytes 0", "--bytes wants 1 to "),
    ("sharded", "--models nothing", "--models: there is no 'nothing'; choose from "),
    ("sharded", "--models ,", "--models wants names separated by commas, like "),
    ("sharded", "--variants nothing", "--variants: there is no 'nothing'"),
    ("sharded", "--ranks 1", "--ranks wants 2 to 64 ranks, not '1'"),
    ("sharded", "--ranks x", "--ranks wants numbers separated by commas, like 2,4, not 'x'"),
    ("slow_link", "--ranks-per-host 0", "--ranks-per-host wants 1 to 8, not 0"),
    ("slow_link", "--steps 1", "--steps wants 5 to"),
    ("slow_link", "--show /nowhere/x.json", "--show: '/nowhere/x.json' is not the JSON of a run"),
    ("two_hosts", "--ours no_such_package.Thing", "Cannot import 'no_such_package'"),
    ("two_hosts", "--bogus", "; see python -m benchmarks.two_hosts --help."),
]


@pytest.mark.parametrize(("benchmarks", "arguments", "words"), WRONG)
def test_a_wrong_argument_is_one_sentence(benchmarks, arguments, words, capsys):
    for benchmark in benchmarks.split():
        assert_refused(main_of(benchmark), arguments.split(), words, capsys)


@pytest.mark.parametrize(
    ("benchmark", "arguments", "words"),
    [
        ("chaos", "--over torchft", "--over torchft needs torchft, which is not installed here."),
        ("convergence", "--task digits", "--task digits needs scikit-learn: pip install scikit-learn, or --task gpt."),
        ("gpu", "", "; --device cpu runs the program without one."),
    ],
)
def test_without_a_package_or_a_gpu_one_sentence_says_so(benchmark, arguments, words, monkeypatch, capsys):
    main = main_of(benchmark)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(main, arguments.split(), words, capsys)


@pytest.mark.parametrize(
    ("benchmark", "text", "words"),
    [
        ("convergence", '{"results": [{"case": "links"}]}', "holds results of links, not convergence"),
        ("slow_link", '{"results": []}', "holds results of nothing, not slow_link"),
        ("host_model", '{"ranks": 2}', "KeyError 'nodes'"),
    ],
)
def test_a_file_of_something_else_is_refused(benchmark, text, words, tmp_path, capsys):
    path = tmp_path / "some.json"
    path.write_text(text)
    option = "--counts" if benchmark == "host_model" else "--show"
    assert_refused(main_of(benchmark), [option, str(path)], words, capsys)


@pytest.mark.parametrize(
    ("user", "missing", "command", "words"),
    [
        (1000, "", [], "as root."),
        (0, "ip", [], "'ip' was not found"),
        (0, "", ["/nowhere/ip"], "Cannot build the emulated network: "),
        (0, "", ["sh", "-c", "echo Operation not permitted. >&2; exit 2"], "said: Operation not permitted."),
    ],
)
def test_without_root_or_programs_there_is_no_network(user, missing, command, words, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == missing else f"/sbin/{name}")
    monkeypatch.setattr(network, "setup_commands", lambda hosts, rate: [command])
    assert_refused(main_of("two_hosts"), ["--ours", TORCH_DDP], words, capsys)
