"""The layout of parameters in flat memory, which is a pure function."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchddp.sharded.parameter_sync import ALIGNMENT_BYTES, plan_chunks

ITEMSIZE = {"half": 2, "double": 8}
NUMELS = st.integers(0, 8) | st.integers(0, 150) | st.integers(0, 3000)
PARAMS = st.lists(st.tuples(NUMELS, st.sampled_from(sorted(ITEMSIZE)), st.integers(0, 1)), min_size=1, max_size=40)
LIMITS = {"max_bytes": st.sampled_from([1, 64, 1000, 4096, 30_000]), "small_numel": st.sampled_from([0, 1, 100, 10**6])}


def plan(params, max_bytes, small_numel):
    tensors = [torch.empty(numel, dtype=getattr(torch, kind), device="meta") for numel, kind, _ in params]
    return plan_chunks(tensors, [owner for _, _, owner in params], max_bytes, small_numel)


@settings(max_examples=300)
@given(params=PARAMS, **LIMITS)
def test_chunks(params, max_bytes, small_numel):
    chunks = plan(params, max_bytes, small_numel)
    placed = sorted(index for chunk in chunks for index in chunk.params)
    assert placed == [index for index, (numel, _, _) in enumerate(params) if numel]
    firsts = [min(chunk.params) for chunk in chunks]
    assert firsts == sorted(firsts)
    for number, chunk in enumerate(chunks):
        # No two overlap.
        ends = [offset + params[index][0] for index, offset in zip(chunk.params, chunk.offsets, strict=True)]
        assert chunk.offsets[0] == 0 and ends[-1] == chunk.numel
        assert all(end <= begin for end, begin in zip(ends, chunk.offsets[1:], strict=False))
        # One dtype and owner per chunk, within the limit, and aligned.
        kind, owner = params[chunk.params[0]][1:]
        assert {params[index][1:] for index in chunk.params} == {(kind, chunk.owner)}
        itemsize = ITEMSIZE[kind]
        assert len(chunk.params) == 1 or chunk.numel * itemsize <= max_bytes
        assert all(offset * itemsize % ALIGNMENT_BYTES == 0 for offset in chunk.offsets)
        # Small parameters are adjacent.
        assert list(chunk.params) == sorted(chunk.params, key=lambda index: (params[index][0] >= small_numel, index))
        # A new chunk starts only if the last one is full.
        earlier = [c for c in chunks[:number] if c.owner == owner and params[c.params[0]][1] == kind]
        if earlier:
            first = params[min(chunk.params)][0]
            whole = (earlier[-1].numel + first) * itemsize + 2 * ALIGNMENT_BYTES
            assert whole > max_bytes
