"""Where each parameter lies in flat memory: pure."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchddp.sharded.parameter_sync import ALIGNMENT_BYTES, plan_chunks

ITEMSIZE = {"half": 2, "double": 8}
NUMELS = st.integers(0, 8) | st.integers(0, 150) | st.integers(0, 3000)
PARAMS = st.lists(st.tuples(NUMELS, st.sampled_from(sorted(ITEMSIZE)), st.integers(0, 1)), min_size=1, max_size=40)
MANY = settings(max_examples=300)
LIMITS = {"max_bytes": st.sampled_from([1, 64, 1000, 4096, 30_000]), "small_numel": st.sampled_from([0, 1, 100, 10**6])}


def plan(params, max_bytes, small_numel):
    tensors = [torch.empty(numel, dtype=getattr(torch, kind), device="meta") for numel, kind, _ in params]
    return plan_chunks(tensors, [owner for _, _, owner in params], max_bytes, small_numel)


@MANY
@given(params=PARAMS, **LIMITS)
def test_nobody_is_lost_and_nobody_overlaps(params, max_bytes, small_numel):
    chunks = plan(params, max_bytes, small_numel)
    placed = sorted(index for chunk in chunks for index in chunk.params)
    assert placed == [index for index, (numel, _, _) in enumerate(params) if numel]
    for chunk in chunks:
        ends = [offset + params[index][0] for index, offset in zip(chunk.params, chunk.offsets, strict=True)]
        assert chunk.offsets[0] == 0 and ends[-1] == chunk.numel
        assert all(end <= begin for end, begin in zip(ends, chunk.offsets[1:], strict=False))


@MANY
@given(params=PARAMS, **LIMITS)
def test_a_chunk_is_of_one_kind_and_owner_within_its_limit_and_aligned(params, max_bytes, small_numel):
    for chunk in plan(params, max_bytes, small_numel):
        assert {(params[index][1], params[index][2]) for index in chunk.params} == {
            (params[chunk.params[0]][1], chunk.owner)
        }
        itemsize = ITEMSIZE[params[chunk.params[0]][1]]
        assert len(chunk.params) == 1 or chunk.numel * itemsize <= max_bytes
        assert all(offset * itemsize % ALIGNMENT_BYTES == 0 for offset in chunk.offsets)


@MANY
@given(params=PARAMS, **LIMITS)
def test_small_ones_are_neighbours_and_chunks_follow_the_order_of_parameters(params, max_bytes, small_numel):
    chunks = plan(params, max_bytes, small_numel)
    firsts = [min(chunk.params) for chunk in chunks]
    assert firsts == sorted(firsts)
    for chunk in chunks:
        assert list(chunk.params) == sorted(chunk.params, key=lambda index: (params[index][0] >= small_numel, index))


@MANY
@given(params=PARAMS, **LIMITS)
def test_a_chunk_is_opened_only_when_the_last_one_is_full(params, max_bytes, small_numel):
    chunks = plan(params, max_bytes, small_numel)
    for number, chunk in enumerate(chunks):
        kind, owner = params[chunk.params[0]][1:]
        earlier = [c for c in chunks[:number] if c.owner == owner and params[c.params[0]][1] == kind]
        if earlier:
            first = params[min(chunk.params)][0]
            whole = (earlier[-1].numel + first) * ITEMSIZE[kind] + 2 * ALIGNMENT_BYTES
            assert whole > max_bytes


def test_wrong_arguments():
    params = [torch.empty(1), torch.empty(2)]
    with pytest.raises(ValueError, match="shorter"):
        plan_chunks(params, [0], 64, 1)
    with pytest.raises(ValueError, match="max_bytes must be at least 1, got 0"):
        plan_chunks(params, [0, 0], 0, 1)
