"""What updates cost, which rank owns each parameter, and where each parameter lies in flat memory."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.docs_hooks import ROOT
from torchddp.sharded.cost import modelled
from torchddp.sharded.group_optimizers import check_defaults
from torchddp.sharded.parameter_sync import ALIGNMENT_BYTES, plan_buckets, plan_chunks
from torchddp.sharded.partition import in_rounds, partition

NUMELS = st.lists(st.integers(0, 10_000), max_size=40)


@given(numels=NUMELS, world_size=st.integers(1, 9))
def test_every_parameter_has_one_owner_and_loads_are_balanced(numels, world_size):
    owners = partition(numels, ["cpu"] * len(numels), world_size)
    assert len(owners) == len(numels) and all(0 <= owner < world_size for owner in owners)
    loads = [sum(n for n, owner in zip(numels, owners, strict=True) if owner == rank) for rank in range(world_size)]
    assert max(loads) - min(loads) <= max(numels, default=0)
    assert owners == partition(list(numels), ("cpu",) * len(numels), world_size)


@given(sizes=st.lists(st.tuples(st.integers(1, 99), st.sampled_from("ab")), max_size=30), world_size=st.integers(1, 5))
def test_each_device_is_balanced_separately(sizes, world_size):
    numels, devices = [size for size, _ in sizes], [device for _, device in sizes]
    owners = partition(numels, devices, world_size)
    for device in set(devices):
        here = [i for i, other in enumerate(devices) if other == device]
        alone = partition([numels[i] for i in here], [device] * len(here), world_size)
        assert [owners[i] for i in here] == alone


@given(data=st.data(), numels=NUMELS, world_size=st.integers(1, 5))
def test_known_owners_are_kept_and_only_wanted_parameters_get_new_ones(data, numels, world_size):
    maybe = st.none() | st.integers(0, world_size - 1)
    known = data.draw(st.lists(maybe, min_size=len(numels), max_size=len(numels)))
    wanted = data.draw(st.lists(st.booleans(), min_size=len(numels), max_size=len(numels)))
    owners = partition(numels, [0] * len(numels), world_size, known, wanted)
    for before, want, after in zip(known, wanted, owners, strict=True):
        assert after == before if before is not None else (after is not None) == want


def test_the_largest_parameter_is_placed_first_and_ties_go_to_the_lower_rank():
    assert partition([1, 5, 5, 2], [0] * 4, 2) == [1, 0, 1, 0]
    assert partition([3], [0], 4) == [0]
    assert partition([10, 1, 1], [0] * 3, 2, [1, None, None]) == [1, 0, 0]


def gpt(layers: int, width: int) -> list[tuple[str, tuple[int, ...]]]:
    """GPT-2's parameters, each with its optimizer."""
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    vectors = [(width,)] * 6 + [(3 * width,), (4 * width,)]
    block = [*(("Muon", shape) for shape in matrices), *(("AdamW", shape) for shape in vectors)]
    return [("AdamW", (50_257, width)), ("AdamW", (1024, width)), *block * layers]


def llama(layers: int, width: int, keys: int, hidden: int, vocabulary: int) -> list[tuple[str, tuple[int, ...]]]:
    matrices = [(width, width)] * 2 + [(keys, width)] * 2 + [(hidden, width)] * 2 + [(width, hidden)]
    block = [*(("Muon", shape) for shape in matrices), *[("AdamW", (width,))] * 2]
    return [*[("AdamW", (vocabulary, width))] * 2, *block * layers]


MODELS = {
    "GPT-2": gpt(12, 768),
    "GPT-2 medium": gpt(24, 1024),
    "GPT-2 large": gpt(36, 1280),
    "GPT-2 XL": gpt(48, 1600),
    "Llama 7B": llama(32, 4096, 4096, 11_008, 32_000),
    "Llama 8B": llama(32, 4096, 1024, 14_336, 128_256),
    "Llama 13B": llama(40, 5120, 5120, 13_824, 32_000),
    "Llama 70B": llama(80, 8192, 1024, 28_672, 128_256),
}


def shared_out(costs, sizes, world_size):
    """Each rank's cost and bytes."""
    owners = partition(costs, [0] * len(costs), world_size, sizes=sizes)
    loads, held = [0.0] * world_size, [0] * world_size
    for owner, cost, size in zip(owners, costs, sizes, strict=True):
        loads[owner] += cost
        held[owner] += size
    return loads, held


@given(
    parts=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 999)), min_size=1, max_size=30),
    world_size=st.integers(1, 6),
)
def test_bytes_are_evened_out_without_raising_the_highest_cost(parts, world_size):
    costs, sizes = [cost for cost, _ in parts], [size for _, size in parts]
    loads, held = shared_out(costs, sizes, world_size)
    alone, without = shared_out(costs, [0] * len(costs), world_size)
    assert max(loads) <= max(alone) and sum(held) == sum(sizes)
    free, evenly = shared_out([0] * len(costs), sizes, world_size)
    assert max(evenly) - min(evenly) <= max(sizes) and not any(free)


def test_cost_models():
    assert modelled("Muon", (3, 5), {}) == 5 * (2 * 9 * 5 + 27) == modelled("SingleDeviceMuon", (5, 3), {})
    assert modelled("Muon", (4, 3, 5), {"ns_steps": 2}) == 4 * 2 * (2 * 9 * 5 + 27)
    assert modelled("Muon", (7,), {}) == 7 and modelled("Muon", (3, 5), {"use_muon": False}) == 15
    assert modelled("Shampoo", (3, 5), {}) == 15 + 2 * 3 * 15 + 27 + 2 * 5 * 15 + 125
    assert modelled("SOAP", (3, 5), {"precondition_frequency": 10, "max_precondition_dim": 4}) == 15 + 90 + 2.7
    assert modelled("SOAP", (7,), {"precondition_1d": False}) == 7
    assert modelled("AdamW", (3, 5), {}) == 15 == modelled("Lion", (3, 5), {})


@given(owners=st.lists(st.integers(0, 4), max_size=20))
def test_messages_go_in_rounds_and_each_owners_in_order(owners):
    order = in_rounds(owners)
    assert sorted(order) == list(range(len(owners)))
    for owner in set(owners):
        own = [index for index in order if owners[index] == owner]
        assert own == sorted(own)
    assert in_rounds([0, 0, 1, 1, 0]) == [0, 2, 1, 3, 4]


@given(numels=NUMELS, limit=st.sampled_from([-1, 1, 50, 5_000]), world_size=st.integers(1, 4))
def test_buckets_hold_each_owned_parameter_once_within_the_limit(numels, limit, world_size):
    params = [torch.empty(n, dtype=[torch.float32, torch.float64][n % 2], device="meta") for n in numels]
    owners = [None if i % 5 == 4 else i % world_size for i in range(len(numels))]
    buckets = plan_buckets(params, owners, limit)
    held = [param for bucket in buckets for param in bucket.params]
    wanted = [p for p, owner in zip(params, owners, strict=True) if owner is not None and p.numel()]
    assert sorted(map(id, held)) == sorted(map(id, wanted))
    owner_of = {id(p): owner for p, owner in zip(params, owners, strict=True)}
    for bucket in buckets:
        assert bucket.numel == sum(p.numel() for p in bucket.params)
        assert {owner_of[id(p)] for p in bucket.params} == {bucket.owner}
        assert {p.dtype for p in bucket.params} == {bucket.dtype}
        assert limit == -1 or bucket.numel <= limit or len(bucket.params) == 1
    if limit == -1:
        assert len(buckets) == len({(bucket.owner, bucket.dtype) for bucket in buckets})


ITEMSIZE = {"half": 2, "double": 8}
SIZES = st.integers(0, 8) | st.integers(0, 150) | st.integers(0, 3000)
PARAMS = st.lists(st.tuples(SIZES, st.sampled_from(sorted(ITEMSIZE)), st.integers(0, 1)), min_size=1, max_size=40)
LIMITS = {"max_bytes": st.sampled_from([1, 64, 1000, 4096, 30_000]), "small_numel": st.sampled_from([0, 1, 100, 10**6])}


def plan(params, max_bytes, small_numel):
    tensors = [torch.empty(numel, dtype=getattr(torch, kind), device="meta") for numel, kind, _ in params]
    return plan_chunks(tensors, [owner for _, _, owner in params], max_bytes, small_numel)


@settings(max_examples=300)
@given(params=PARAMS, **LIMITS)
def test_chunks_hold_each_parameter_once_aligned_and_within_the_limit(params, max_bytes, small_numel):
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


WORLD_SIZES = (2, 4, 8, 16, 32, 64)


def balance_table() -> list[str]:
    """Rows of docs/muon.md: the highest cost of a rank, in means, by model and number of ranks."""
    rows = []
    for name, parameters in MODELS.items():
        costs = [modelled(kind, shape, {}) for kind, shape in parameters]
        sizes = [4 * math.prod(shape) for _, shape in parameters]
        means = [sum(costs) / world_size for world_size in WORLD_SIZES]
        highest = [max(shared_out(costs, sizes, world_size)[0]) for world_size in WORLD_SIZES]
        cells = [f"{h / m:.2f}" for h, m in zip(highest, means, strict=True)]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def test_the_table_in_the_docs_is_what_owners_are_chosen_by():
    page = (ROOT / "docs" / "muon.md").read_text()
    assert [row for row in balance_table() if row not in page] == []


def test_only_optimizers_that_cannot_take_an_argument_of_torchs_are_refused_it():
    for optim in (lambda groups, **options: None, lambda groups, process_group: None):
        check_defaults(optim, {"process_group": None})
    with pytest.raises(TypeError, match=r"no argument process_group, .*: give group="):
        check_defaults(torch.optim.SGD, {"process_group": None})
