"""The messages about models that differ between ranks."""

import torch

from torchddp.ddp.same_model import MAX_DIFFERENCES, describe, find_differences


def _model(**shapes: tuple[int, ...]):
    return describe([torch.zeros(shape) for shape in shapes.values()], list(shapes))


def test_models_that_differ_only_in_names_are_equal():
    assert find_differences([_model(a=(2, 3), b=(3,))] * 4) == []
    assert find_differences([_model(a=(2,), b=(3,)), _model(x=(2,), y=(3,))]) == []


def test_differences_of_shapes_order_and_number():
    (text,) = find_differences([_model(a=(2, 3)), _model(a=(2, 4))])
    assert text.startswith("[1]: params[0] ('a')")
    assert "[2, 4]" in text and "[2, 3]" in text and "process 0" in text
    (text,) = find_differences([_model(a=(2,), b=(2,)), _model(b=(2,), a=(2,))])
    assert "different order" in text and "'b'" in text and "'a'" in text and "Rank 1" in text
    (text,) = find_differences([_model(a=(2,), b=(3,)), _model(a=(2,), c=(3,), d=(1,))])
    assert "Rank 0 has 2 params, while rank 1 has inconsistent 3 params" in text
    assert "Only Rank 0 has 'b'" in text and "Only rank 1 has 'c', 'd'" in text
    found = find_differences([_model(a=(2,)), _model(a=(3,)), _model(a=(2,)), _model(a=(4,))])
    assert [text[:3] for text in found] == ["[1]", "[3]"]
    assert MAX_DIFFERENCES >= len(found)


def test_dtype_and_strides():
    reference = _model(a=(2, 3), b=(2, 3))
    other = describe([torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, 2).t()], ["a", "b"])
    dtype, strides = find_differences([reference, reference, other])
    assert dtype.startswith("[2]: params[0] ('a')") and "float64" in dtype and "float32" in dtype
    assert strides.startswith("[2]: params[1] ('b')") and "strides [1, 2]" in strides
