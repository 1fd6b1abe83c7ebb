"""The layout of gradients in a bucket, and how residuals move when buckets change."""

import pytest
import torch

from torchddp.comm_hooks.layout import Layout, Residuals, Slot

A, B, C = Slot("a", 0, (2, 2), 4), Slot("b", 8, (3,), 3), Slot("c", 11, (2,), 2)
PADDED = Layout((A, B, C), 16)
SHAPES = {"a": torch.Size((2, 2)), "b": torch.Size((3,)), "c": torch.Size((2,))}


def test_gaps():
    assert PADDED.gaps == ((4, 8), (13, 16))
    assert Layout.packed(PADDED.slots) == Layout((A, Slot("b", 4, (3,), 3), Slot("c", 7, (2,), 2)), 9)
    with pytest.raises(ValueError, match="b begins at 8, before the end of the previous slot, 13"):
        Layout((C, B), 16)
    with pytest.raises(ValueError, match="13 elements of 12"):
        Layout((C,), 12)


@pytest.mark.parametrize(("begin", "end"), [(0, 16), (0, 6), (6, 16), (5, 7), (10, 20), (16, 20)])
def test_gaps_in_a_range_are_cleared(begin, end):
    part = torch.ones(end - begin)
    PADDED.clear_gaps(part, begin)
    inside = [any(slot.offset <= i < slot.end for slot in PADDED.slots) for i in range(begin, end)]
    assert part.tolist() == [float(used) for used in inside]


def test_residuals_move_by_name():
    residuals, like = Residuals(), torch.empty(0)
    held = residuals.of(PADDED, like, 0, 16)
    held.copy_(torch.arange(16.0))
    again = residuals.of(PADDED, like, 0, 16)
    assert again.data_ptr() == held.data_ptr()
    assert again[4:8].tolist() == [0.0] * 4  # belongs to no parameter
    moved = residuals.of(Layout.packed((C, A)), like, 0, 6)
    assert moved.tolist() == [11, 12, 0, 1, 2, 3]
    moved[0] = 20.0
    state = residuals.state_dict(SHAPES)
    assert {name: value.tolist() for name, value in state.items()} == {
        "a": [[0, 1], [2, 3]],
        "b": [8, 9, 10],
        "c": [20, 12],
    }


def test_shares_of_residuals_move_between_ranks():
    """Two ranks hold half each; in new buckets they hold other halves, and nothing is lost."""
    like, ranks = torch.empty(0), [Residuals(), Residuals()]
    for index, residuals in enumerate(ranks):
        residuals.of(PADDED, like, 8 * index, 8 * index + 8).copy_(torch.arange(8.0) + 8 * index)
    packed = Layout.packed((C, B, A))
    whole = sum(ranks[i]._collect(packed, like, None) for i in range(2))
    assert whole.tolist() == [11, 12, 8, 9, 10, 0, 1, 2, 3]
    halves = [r.of(packed, like, 5 * i, 5 * i + 5, lambda flat: flat.copy_(whole)) for i, r in enumerate(ranks)]
    assert torch.cat(halves).tolist() == [*whole.tolist(), 0.0]
    states = [residuals.state_dict(SHAPES) for residuals in ranks]
    loaded = Residuals()
    loaded.load_state_dict({name: states[0][name] + states[1][name] for name in SHAPES})
    assert loaded.of(PADDED, like, 0, 16).tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 8, 9, 10, 11, 12, 0, 0, 0]
