"""Parameter owners, buckets, and messages when ranks differ, all from pure functions."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from torchddp.sharded.parameter_sync import plan_buckets
from torchddp.sharded.partition import partition

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
def test_owners_are_kept_and_only_wanted_parameters_get_one(data, numels, world_size):
    maybe = st.none() | st.integers(0, world_size - 1)
    known = data.draw(st.lists(maybe, min_size=len(numels), max_size=len(numels)))
    wanted = data.draw(st.lists(st.booleans(), min_size=len(numels), max_size=len(numels)))
    owners = partition(numels, [0] * len(numels), world_size, known, wanted)
    for before, want, after in zip(known, wanted, owners, strict=True):
        assert after == before if before is not None else (after is not None) == want


def test_largest_first_ties_to_the_lower_rank():
    assert partition([1, 5, 5, 2], [0] * 4, 2) == [1, 0, 1, 0]
    assert partition([3], [0], 4) == [0]
    assert partition([10, 1, 1], [0] * 3, 2, [1, None, None]) == [1, 0, 0]


@given(numels=NUMELS, limit=st.sampled_from([-1, 1, 50, 5_000]), world_size=st.integers(1, 4))
def test_buckets_hold_each_owned_parameter_once_and_keep_the_limit(numels, limit, world_size):
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
