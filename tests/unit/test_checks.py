"""Checks that all ranks hold the same model: tensor hashes, the rank that differs, and the error messages."""

import pickle

import pytest
import torch

from torchddp import Checks, DesyncError
from torchddp.ddp.module import options_of
from torchddp.ddp.same_model import MAX_DIFFERENCES, describe, find_differences
from torchddp.diagnose.parameters import Amount, Difference, check_parameters, find_difference, hash_tensors, make_error

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.bool]


def hash_of(tensor, by_operators=False):
    return hash_tensors([tensor], by_operators=by_operators)[0]


@pytest.mark.parametrize("by_operators", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_hash_covers_the_bits_in_logical_order(dtype, by_operators):
    torch.manual_seed(0)
    plain = (torch.randn(7, 3, 5) * 100).to(dtype)
    strided = plain.transpose(0, 2).contiguous().transpose(0, 2)
    part = torch.cat([plain.flatten()[:1], plain.flatten()])[1:].view(7, 3, 5)
    assert not strided.is_contiguous() and part.data_ptr() % 8 or dtype.itemsize >= 8
    pairs = [plain[::2], plain[::2].contiguous(), plain.conj(), plain.conj().resolve_conj()]
    hashes = hash_tensors([plain, strided, part, *pairs], by_operators=by_operators)
    assert len(set(hashes[:3])) == 1 and hashes[3] == hashes[4] != hashes[0] and hashes[5] == hashes[6]
    if dtype != torch.bool:
        assert hash_of(plain.flip(0), by_operators) != hashes[0]
        swapped = plain.flatten().clone()
        swapped[[3, 90]] = swapped[[90, 3]]
        assert hash_of(swapped, by_operators) != hashes[0]


def test_a_hash_by_operators_covers_all_bits():
    """tests/cpp checks the same of the compiled hash."""
    values = torch.zeros(1000)
    seen = {hash_of(values, True)}
    for index in (0, 1, 499, 999):
        for word in (1, -(2**31), 0x7FC00000, 0x7FC00001):
            other = values.clone()
            other.view(torch.int32)[index] = word
            seen.add(hash_of(other, True))
            assert hash_of(other.clone(), True) == hash_of(other, True), (index, word)
    assert len(seen) == 17
    assert hash_of(values[:999], True) not in seen
    values = torch.zeros(5 * 2**20, dtype=torch.int8)
    before = hash_of(values, True)
    values[-1] = 1
    assert hash_of(values, True) != before
    with pytest.raises(RuntimeError, match="tensor 1 has no memory to hash"):
        hash_tensors([torch.ones(1), torch.ones(2, device="meta")])


def test_the_ranks_outside_the_majority_are_reported():
    assert find_difference([[1, 2], [1, 2], [1, 2]]) is None
    assert find_difference([[1, 2, 3], [1, 2, 4], [1, 5, 3]]) == Difference(1, 0, (2,), 2)
    assert find_difference([[9, 2], [1, 2], [1, 2]]) == Difference(0, 1, (0,), 1)
    assert find_difference([[1], [2]]) == Difference(0, 0, (1,), 1)
    assert find_difference([[1], [2], [2], [3]]) == Difference(0, 0, (1, 2, 3), 1)  # half is no majority
    amounts = [Amount(0, 0.0), Amount(0, 0.0), Amount(1, 0.25)]
    error = make_error(Difference(1, 0, (2,), 3), "a.weight", "torch.float32 [4]", 3, 7, amounts, 40)
    for words in ("after 40 synchronized", "3 of 7 differ", "'a.weight' (torch.float32 [4])", "rank 2 differs from"):
        assert words in str(error)
    assert "ranks 0 and 1, the majority" in str(error) and "rank 2 in 1 element, by up to 0.25" in str(error)
    assert (error.step, error.parameter, error.ranks, error.num_parameters) == (40, "a.weight", (2,), 3)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, DesyncError) and again.max_difference == 0.25 and str(again) == str(error)
    without = make_error(Difference(0, 0, (1,), 1), "a", "b", 2, 1, None, 0)
    assert without.max_difference is None and "the majority" not in str(without)


@pytest.mark.parametrize("wrong", [0, -3, 1.5, True, "100"])
def test_an_invalid_check_interval_is_refused(wrong):
    with pytest.raises(ValueError, match=r"parameters_every=\) must be a number of steps, 1 or more.*got"):
        options_of(checks=Checks(parameters_every=wrong))


def test_invalid_find_nonfinite_and_module_arguments_are_refused():
    for choice in (False, True, "raise"):
        options_of(checks=Checks(nonfinite=choice))
    with pytest.raises(ValueError, match="nonfinite=\\) must be False, True or \"raise\", got 'warn'"):
        options_of(checks=Checks(nonfinite="warn"))
    with pytest.raises(TypeError, match=r"needs a torchddp\.DistributedDataParallel, got Linear"):
        check_parameters(torch.nn.Linear(1, 1))


def _model(**shapes: tuple[int, ...]):
    return describe([torch.zeros(shape) for shape in shapes.values()], list(shapes))


def test_differing_models_are_reported_by_rank_and_parameter():
    assert find_differences([_model(a=(2, 3), b=(3,))] * 4) == []
    assert find_differences([_model(a=(2,), b=(3,)), _model(x=(2,), y=(3,))]) == []
    (text,) = find_differences([_model(a=(2,), b=(3,)), _model(a=(2,), c=(3,), d=(1,))])
    assert "Rank 0 has 2 params, while rank 1 has inconsistent 3 params" in text
    assert "Only Rank 0 has 'b'" in text and "Only rank 1 has 'c', 'd'" in text
    found = find_differences([_model(a=(2,)), _model(a=(3,)), _model(a=(2,)), _model(a=(4,))])
    assert [text[:6] for text in found] == ["rank 1", "rank 3"]
    assert MAX_DIFFERENCES >= len(found)
