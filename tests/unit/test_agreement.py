"""What ranks tell each other and agree on, over each way there is to talk."""

import datetime
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from torchddp import _C, TransportError
from torchddp.transport import agreement
from torchddp.transport.agreement import (
    GroupExchange,
    Peer,
    StoreExchange,
    TransportExchange,
    align_group_counts,
    connect_all,
    first_difference,
    gather_if_different,
    list_problems,
    part_of_store,
    ranks_by,
    ranks_per_host,
    verify_agreement,
)
from torchddp.transport.select import open_transport

CPU = torch.device("cpu")
SOON_S = 15.0
SECOND, MINUTE = datetime.timedelta(seconds=1), datetime.timedelta(minutes=1)
BIG = 2**62 + 1  # no fp64 number

at_each_world_size = pytest.mark.parametrize("world_size", [1, 3])
over_each_transport = pytest.mark.parametrize("transport", ["c10d", "shm"])


def on_threads(work, size):
    """Runs `work(rank)` on a thread for each rank; their results."""
    results = [None] * size

    def run(rank):
        results[rank] = work(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    return results


def raises_within(seconds, kind, match, call):
    begun_s = time.monotonic()
    with pytest.raises(kind, match=match):
        call()
    assert time.monotonic() - begun_s < seconds


@at_each_world_size
def test_a_group_carries_any_value(world_size):
    def work(rank):
        exchange = GroupExchange(dist.group.WORLD)
        assert (exchange.rank, exchange.size) == (rank, world_size)
        told = exchange.gather({"rank": rank, "text": "x" * (rank * 20_000)})
        return told, exchange.gather((rank, None)), exchange.gather_integer(BIG - rank)

    values = [{"rank": rank, "text": "x" * (rank * 20_000)} for rank in range(world_size)]
    pairs, integers = [(rank, None) for rank in range(world_size)], [BIG - rank for rank in range(world_size)]
    assert run_ranks(work, world_size) == [(values, pairs, integers)] * world_size


def test_a_group_waits_no_longer_than_its_limit():
    def work(rank):
        if rank == 0:
            raises_within(SOON_S, RuntimeError, "", lambda: GroupExchange(dist.group.WORLD).gather("alone"))
            part_of_store(dist.group.WORLD, "done").set("0", "")
        else:
            part_of_store(dist.group.WORLD, "done").wait(["0"], MINUTE)

    run_ranks(work, 2, group_timeout_s=1.0)


@at_each_world_size
def test_a_store_carries_values_of_json_and_is_as_before(world_size):
    store = dist.HashStore()
    before = store.num_keys()

    def work(rank):
        exchange = StoreExchange(store, rank, world_size, MINUTE, "the test")
        told = exchange.gather({"rank": rank}), exchange.gather("a"), exchange.gather(BIG - rank)
        exchange.close()
        return told

    for _ in range(2):  # what the first left would be taken for the second's
        ranks = range(world_size)
        expected = [{"rank": rank} for rank in ranks], ["a"] * world_size, [BIG - rank for rank in ranks]
        assert on_threads(work, world_size) == [expected] * world_size
        assert store.num_keys() == before


@pytest.mark.parametrize(("size", "missing"), [(2, 1), (3, 0)])
def test_a_store_names_the_rank_that_does_not_come(size, missing):
    store = dist.HashStore()
    found = []

    def work(rank):
        if rank == missing:
            return
        exchange = StoreExchange(store, rank, size, SECOND, "the test")
        text = rf"rank {rank}: the test got no answer from rank {missing} within 0:00:01: "
        raises_within(SOON_S, RuntimeError, text, lambda: exchange.gather(rank))
        found.append(rank)

    on_threads(work, size)
    assert sorted(found) == [rank for rank in range(size) if rank != missing]


def test_an_interrupt_ends_the_wait_over_a_store():
    def work(rank):
        exchange = StoreExchange(dist.HashStore(), 0, 2, MINUTE, "the test")
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        raises_within(SOON_S, KeyboardInterrupt, "", lambda: exchange.gather(0))

    run_ranks(work, 1)


def test_parts_of_a_store_have_keys_of_their_own_and_a_restarted_job_has_others(monkeypatch):
    def work(rank):
        group = dist.group.WORLD
        parts = [part_of_store(group, name) for name in "aab"]
        parts[0].set(f"key{rank}", "")
        dist.barrier()
        for attempt in "01":
            agreement._parts.clear()  # as in a new process
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
            parts.append(part_of_store(group, "a"))
        return [part.check([f"key{1 - rank}"]) for part in parts]

    monkeypatch = pytest.MonkeyPatch()  # the ranks have an environment of their own
    assert run_ranks(work, 2) == [[True, False, False, True, False]] * 2


@over_each_transport
@at_each_world_size
def test_a_transport_carries_numbers_of_one_kind(world_size, transport):
    def work(rank):
        own = open_transport(transport, dist.group.WORLD)
        whole, real = TransportExchange(own, int, CPU), TransportExchange(own, float, CPU)
        assert (whole.rank, whole.size) == (rank, world_size)
        # On rank 0 a whole number, elsewhere none: all are sent alike.
        told = real.gather([rank * 0.5, float("inf")]), real.of_rank_0([1 if rank == 0 else 0.25])
        with pytest.raises(TypeError):
            whole.gather([0.5])
        return whole.gather([BIG - rank, -rank]), whole.of_rank_0([BIG - rank]), told

    ranks = range(world_size)
    expected = [[BIG - r, -r] for r in ranks], [BIG], ([[r * 0.5, float("inf")] for r in ranks], [1.0])
    assert run_ranks(work, world_size) == [expected] * world_size


@over_each_transport
def test_a_transport_waits_no_longer_than_it_is_told(transport):
    def work(rank):
        own = open_transport(transport, dist.group.WORLD)
        if rank == 0:
            exchange = TransportExchange(own, int, CPU, SECOND)
            raises_within(SOON_S, TransportError, "rank 1" if transport == "shm" else "", lambda: exchange.gather([1]))
            part_of_store(dist.group.WORLD, "done").set("0", "")
        else:
            part_of_store(dist.group.WORLD, "done").wait(["0"], MINUTE)

    run_ranks(work, 2)


def test_ranks_of_the_fullest_host(monkeypatch):
    def work(rank):
        monkeypatch.setenv("TORCHDDP_HOST_ID", "ab"[rank // 2])
        return ranks_per_host(TransportExchange(_C.C10dTransport(dist.group.WORLD), int, CPU))

    assert run_ranks(work, 3) == [2] * 3


def test_problems_name_their_ranks():
    assert ranks_by([]) == {} and list(ranks_by("bab").items()) == [("b", [0, 2]), ("a", [1])]
    assert list_problems([]) == list_problems(["", ""]) == ""
    assert list_problems(["x", "", "y", "x"]) == "rank 0, 3: x; rank 2: y"


class Counted(GroupExchange):
    """Counts the messages of a rank."""

    sent = 0

    def _all_gather(self, own):
        self.sent += 1
        return super()._all_gather(own)


@at_each_world_size
def test_values_travel_only_where_they_differ(world_size):
    def work(rank):
        exchange = Counted(dist.group.WORLD)
        assert gather_if_different(["the same", (1, 2)], exchange) is None
        assert exchange.sent == (world_size > 1)
        return gather_if_different(["differs on the last", rank == world_size - 1], exchange), exchange.sent

    values = [["differs on the last", rank == world_size - 1] for rank in range(world_size)]
    expected = (values, 4) if world_size > 1 else (None, 0)
    assert run_ranks(work, world_size) == [expected] * world_size


def test_the_first_difference_is_told_on_all_ranks():
    def work(rank):
        group = dist.group.WORLD
        verify_agreement(["a", "b"], None, group)
        with pytest.raises(RuntimeError) as caught:
            verify_agreement(["a", "c" if rank == 2 else "b"], None, group, "The test")
        return str(caught.value)

    text = "The test needs the same parameters on all ranks. On rank 2 it is c, on rank 0 b."
    assert run_ranks(work, 3) == [text] * 3
    assert "only rank 1 has is b" in first_difference([["a"], ["a", "b"]])


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1), (0, 1, 2)], ids=str)
def test_an_error_of_some_ranks_is_one_of_all(failing):
    def work(rank):
        error = ValueError("no such thing") if rank in failing else None
        with pytest.raises((ValueError, RuntimeError)) as caught:
            verify_agreement([f"rank {rank}"], error, dist.group.WORLD)
        return type(caught.value), str(caught.value)

    ranks = ", ".join(map(str, failing))
    quoted = RuntimeError, f"OSS failed on other ranks: rank {ranks}: ValueError: no such thing"
    own = ValueError, "no such thing"
    assert run_ranks(work, 3) == [own if rank in failing else quoted for rank in range(3)]


def test_the_same_error_everywhere_needs_no_more_messages():
    def work(rank):
        for _ in range(2):  # ranks that had gathered more would meet others' next message
            with pytest.raises(ValueError, match="no such thing"):
                verify_agreement(["a"], ValueError("no such thing"), dist.group.WORLD)
        return GroupExchange(dist.group.WORLD).gather(rank)

    assert run_ranks(work, 2) == [[0, 1]] * 2


@pytest.mark.parametrize(
    ("problems", "against", "failing", "outcome"),
    [
        (["", "", ""], "", {}, ["connection of rank 0", "connection of rank 1", "connection of rank 2"]),
        (["", "no driver", ""], "unheard", {}, ["rank 1: no driver"] * 3),
        (["", "", ""], "three are too many", {}, ["three are too many"] * 3),
        (["", "", ""], "", {0: "no room", 2: "no room"}, ["rank 0, 2: no room"] * 3),
        (["", "", ""], "", {1: ""}, ["rank 1: RuntimeError"] * 3),
    ],
)
def test_all_ranks_connect_or_hear_the_same_reason(problems, against, failing, outcome):
    store = dist.HashStore()

    def work(rank):
        def connect(peers):
            assert [peer.problem for peer in peers] == problems
            if rank in failing:
                raise RuntimeError(failing[rank])
            return f"connection of rank {rank}"

        exchange = StoreExchange(store, rank, 3, MINUTE, "the test")
        return connect_all(exchange, Peer(problem=problems[rank]), lambda _: against, connect)

    assert on_threads(work, 3) == outcome


@at_each_world_size
def test_groups_of_ranks_from_elsewhere_have_the_same_name(world_size):
    def work(rank):
        for _ in range(rank):
            dist.new_group([rank], use_local_synchronization=True)
        align_group_counts(dist.group.WORLD)
        ranks = list(range(world_size))
        group = dist.new_group(ranks, use_local_synchronization=True, timeout=datetime.timedelta(seconds=10))
        return group.group_name, GroupExchange(group).gather(rank)

    names, values = zip(*run_ranks(work, world_size), strict=True)
    assert len(set(names)) == 1 and list(values) == [list(range(world_size))] * world_size
