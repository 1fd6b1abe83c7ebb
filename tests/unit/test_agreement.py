"""How ranks exchange values and agree: over a process group, a store and a transport."""

import datetime
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.harness import each, gathered, on_ranks, stay
from torchddp import _C, TransportError, _torch
from torchddp.transport import agreement, store
from torchddp.transport.agreement import Agreement, GroupExchange, Peer, StoreExchange, TransportExchange
from torchddp.transport.select import open_transport

CPU = torch.device("cpu")
SECOND, MINUTE = datetime.timedelta(seconds=1), datetime.timedelta(minutes=1)
LIMIT = datetime.timedelta(seconds=6)  # a rank that runs answers in this time
BIG = 2**62 + 1  # not representable in fp64


def on_threads(work, size):
    """Run `work(rank)` on a thread per rank and return the results."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


@on_ranks(1, 3)
def test_a_group_exchanges_any_picklable_value(rank, world_size):
    exchange = GroupExchange(dist.group.WORLD)
    assert (exchange.rank, exchange.size) == (rank, world_size)
    for values in (
        [{"rank": rank, "text": "x" * (rank * 20_000)} for rank in range(world_size)],
        [(rank, None) for rank in range(world_size)],
    ):
        assert exchange.gather(values[rank]) == values
    assert exchange.gather_integer(BIG - rank) == [BIG - rank for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_store_exchanges_json_values_and_leaves_no_keys(world_size):
    store = dist.HashStore()
    before = store.num_keys()

    def work(rank):
        exchange = StoreExchange(store, rank, world_size, MINUTE, "the test")
        gathered_values = exchange.gather({"rank": rank}), exchange.gather("a"), exchange.gather(BIG - rank)
        exchange.close()
        return gathered_values

    for _ in range(2):  # the second must not read keys of the first
        ranks = range(world_size)
        expected = [{"rank": rank} for rank in ranks], ["a"] * world_size, [BIG - rank for rank in ranks]
        assert on_threads(work, world_size) == [expected] * world_size
        assert store.num_keys() == before


def test_a_timeout_over_a_store_names_the_missing_rank():
    size, missing = 3, 0
    store = dist.HashStore()

    def work(rank):
        if rank == missing:
            return
        exchange = StoreExchange(store, rank, size, SECOND, "the test")
        text = rf"rank {rank}: the test got no answer from rank {missing} within 0:00:01: "
        with pytest.raises(RuntimeError, match=text):
            exchange.gather(rank)

    on_threads(work, size)


@on_ranks(1)
def test_an_interrupt_ends_the_wait_over_a_store():
    exchange = StoreExchange(dist.HashStore(), 0, 2, MINUTE, "the test")
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        exchange.gather(0)


@on_ranks(2)
def test_keys_belong_to_one_attempt_and_one_life_of_a_group(rank, monkeypatch):
    """Also of groups that one process after another joins over one store, under one name."""
    parts = [store.part_of_store(dist.group.WORLD, name) for name in "aab"]
    parts[0].set(f"key{rank}", "")
    dist.barrier()
    shared = dist.distributed_c10d._get_default_store()
    for attempt in "0011":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        parts.append(dist.PrefixStore("a/0", dist.PrefixStore(store.begin_life(shared, "group_0", rank), shared)))
        parts[-1].set(f"own{rank}", "")
    dist.barrier()
    assert [part.check([f"key{1 - rank}"]) for part in parts] == [True, *[False] * 6]
    assert [part.check([f"own{1 - rank}"]) for part in parts] == [*[False] * 3, *[True] * 4]


@on_ranks(1, 3)
def test_a_transport_exchanges_numbers_of_one_type(rank, world_size):
    ranks = range(world_size)
    for transport in each(["c10d", "shm"]):
        own = open_transport(transport, dist.group.WORLD)
        whole, real = TransportExchange(own, int, CPU), TransportExchange(own, float, CPU)
        assert (whole.rank, whole.size) == (rank, world_size)
        assert real.gather([rank * 0.5, float("inf")]) == [[r * 0.5, float("inf")] for r in ranks]
        assert real.of_rank_0([1 if rank == 0 else 0.25]) == [1.0]  # an int on rank 0 only: all are sent as floats
        with pytest.raises(TypeError):
            whole.gather([0.5])
        assert whole.gather([BIG - rank, -rank]) == [[BIG - r, -r] for r in ranks]
        assert whole.of_rank_0([BIG - rank]) == [BIG]


@on_ranks(2)
def test_no_rank_waits_longer_than_the_limit(rank):
    group = GroupExchange(dist.new_group(timeout=LIMIT))
    c10d, shm = (
        TransportExchange(open_transport(choice, dist.group.WORLD), int, CPU, LIMIT) for choice in ("c10d", "shm")
    )
    waits = (group, RuntimeError, ""), (c10d, TransportError, ""), (shm, TransportError, "rank 1")

    def work(index):
        exchange, kind, words = waits[index]
        with pytest.raises(kind, match=words):
            exchange.gather([1])

    if rank == 0:
        on_threads(work, len(waits))
    stay(rank)


class Counted(GroupExchange):
    """Counts the messages that a rank sends."""

    sent = 0

    def _all_gather(self, own):
        self.sent += 1
        return super()._all_gather(own)


@on_ranks(1, 3)
def test_values_are_gathered_only_if_they_differ(rank, world_size):
    exchange = Counted(dist.group.WORLD)
    assert agreement.gather_if_different(["the same", (1, 2)], exchange) is None
    assert exchange.sent == (world_size > 1)
    told = agreement.gather_if_different(["differs on the last", rank == world_size - 1], exchange)
    values = [["differs on the last", rank == world_size - 1] for rank in range(world_size)]
    assert (told, exchange.sent) == ((values, 4) if world_size > 1 else (None, 0))


@on_ranks(3)
def test_ranks_per_host_counts_the_fullest_host(rank, monkeypatch):
    monkeypatch.setenv("TORCHDDP_HOST_ID", "ab"[rank // 2])
    assert agreement.ranks_per_host(TransportExchange(_C.C10dTransport(dist.group.WORLD), int, CPU)) == 2


@on_ranks(3)
def test_a_rank_that_cannot_tell_its_host_counts_as_one(rank, monkeypatch):
    if rank < 2:
        refused = _C.SharedMemoryUnavailable("could not read /proc/sys/kernel/random/boot_id")
        monkeypatch.setattr(_C, "host_identity", mock.Mock(side_effect=refused))
    assert agreement.ranks_of_hosts(GroupExchange(dist.group.WORLD)) == [[0], [1], [2]]
    assert agreement.ranks_per_host(TransportExchange(_C.C10dTransport(dist.group.WORLD), int, CPU)) == 1


@on_ranks(3)
def test_the_first_difference_between_ranks_is_raised_on_all_ranks(rank):
    Agreement("OSS", dist.group.WORLD).verify(["a", "b"], {"size": "3"})
    with pytest.raises(RuntimeError) as caught:
        Agreement("The test", dist.group.WORLD).verify(["a", "c" if rank == 2 else "b"])
    assert str(caught.value) == "The test needs the same parameters on all ranks. On rank 2 it is c, on rank 0 b."
    with pytest.raises(ValueError) as caught:
        Agreement("The test", dist.group.WORLD).verify(["a"], {"size": "3", "half": str(rank == 1)})
    told = "The test needs the same options on all ranks: half is False on rank 0, 2, True on rank 1."
    assert str(caught.value) == told
    with pytest.raises(RuntimeError, match="different calls: OSS on rank 0, 1, clip on rank 2"):
        Agreement("clip" if rank == 2 else "OSS", dist.group.WORLD).verify()
    assert "only rank 1 has is b" in agreement.first_difference([["a"], ["a", "b"]])


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
def test_all_ranks_connect_or_get_the_same_reason(problems, against, failing, outcome):
    store = dist.HashStore()

    def work(rank):
        def connect(peers):
            assert [peer.problem for peer in peers] == problems
            if rank in failing:
                raise RuntimeError(failing[rank])
            return f"connection of rank {rank}"

        exchange = StoreExchange(store, rank, 3, MINUTE, "the test")
        return agreement.connect_all(exchange, Peer(problem=problems[rank]), lambda _: against, connect)

    assert on_threads(work, 3) == outcome


@on_ranks(1, 3)
def test_aligned_group_counts_give_new_groups_the_same_name_on_all_ranks(rank, world_size):
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    agreement.align_group_counts(dist.group.WORLD)
    ranks = list(range(world_size))
    group = _torch.new_local_group(ranks, timeout=MINUTE)
    assert GroupExchange(group).gather(rank) == ranks
    assert len(set(gathered(group.group_name))) == 1


@on_ranks(3)
def test_ranks_of_a_group_without_cpu_tensors_agree_through_its_store(rank, world_size, monkeypatch):
    """A message over NCCL would create torch's communicator."""
    monkeypatch.setattr(agreement, "message_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(agreement, "group_timeout", lambda *_: LIMIT)
    monkeypatch.setattr(dist, "all_gather", lambda *_, **__: pytest.fail("a message went through the group"))
    group = dist.group.WORLD
    home = store._torch.store_of(group)
    assert Agreement("the test", group).gather(torch.Size([3])) is None
    dist.barrier()
    before = home.num_keys()
    dist.barrier()
    assert Agreement("the test", group).gather((rank, {"a"})) == [(r, {"a"}) for r in range(world_size)]
    with pytest.raises(ValueError if rank == 1 else RuntimeError, match="no such thing"):
        with Agreement("the test", group) as begun:
            if rank == 1:
                raise ValueError("no such thing")
            begun.verify(["x"])
    with pytest.raises(RuntimeError, match="The ranks are in different calls: A on rank 0, 2, B on rank 1"):
        Agreement("B" if rank == 1 else "A", group).verify(["x"])
    dist.barrier()
    assert home.num_keys() == before  # it can go on for years
    dist.barrier()
    if rank != 2:
        with pytest.raises(TransportError, match=f"rank {rank}: comparing the ranks got no answer from rank 2 within"):
            Agreement("the test", group).verify(["x"])


def test_options_in_words_are_equal_on_ranks_with_other_devices():
    """A learning rate may be a tensor on the rank's own GPU; also hooks have repr's with addresses."""

    class Rate:
        def __init__(self, rank):
            self.text = f"tensor(0.1000, device='cuda:{rank}') of <function f at 0x{rank}>"

        def __repr__(self):
            return self.text

    assert agreement.in_words(Rate(0)) == agreement.in_words(Rate(1)) == "tensor(0.1000, device='cuda') of <function f>"
