"""The commands in benchmarks/ refuse a wrong argument with exit code 2 and one sentence that names it."""

import importlib
import importlib.util
import itertools

import pytest

from tests.unit.helpers import assert_refused


def main_of(benchmark: str):
    return importlib.import_module(f"benchmarks.{benchmark}.cli").main


REFUSED = {
    "chaos": ["--json /", "--trials 0", "--trials 5 --only 5", "--kinds kill,flood", "--world-sizes 2,5"],
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
    ],
)
def test_the_sentence_says_which_values_are_allowed(benchmark, arguments, words, capsys):
    assert_refused(main_of(benchmark), arguments.split(), words, capsys)


def test_a_missing_package_is_reported_in_one_sentence(monkeypatch, capsys):
    for benchmark, arguments, words in (
        ("chaos", "--over torchft", "--over torchft needs torchft, which is not installed here."),
    ):
        main = main_of(benchmark)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert_refused(main, arguments.split(), words, capsys)
