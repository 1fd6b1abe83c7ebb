"""The slow rank is named while training runs: docs/stragglers.md."""

import contextlib
import gc
import multiprocessing
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import gathered, logged, on_ranks, over_both, run_ranks
from tests.unit.helpers import wait_until
from torchddp import DDP, Checks
from torchddp.notices import listen

pytestmark = pytest.mark.beyond_torch("names no stragglers")

BASE_S, MORE_S = 0.006, 0.012
MOST_STEPS = 1500


class Net(nn.Module):
    """Sleeps as long in forward as in backward, and longer in the part that is slow."""

    def __init__(self, *more):
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(16, 16), *more), nn.Linear(16, 4)
        self.slow, self.more_s = "", MORE_S

    def sleep(self, part):
        time.sleep(BASE_S + self.more_s * (part == self.slow))

    def forward(self, x):
        self.sleep("forward")
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.sleep("backward"))
        return self.last(hidden)


class Training:
    def __init__(self, rank, model, microbatches=1):
        self.rank, self.model, self.microbatches = rank, model, microbatches
        self.told = []
        listen(lambda notice: self.told.append((notice.details["rank"], notice.details.get("part", "over"))))

    def steps(self, number, culprit=-1, slow=""):
        net = self.model.module
        for _ in range(number):
            net.slow = slow if self.rank == culprit else ""
            net.sleep("data")
            for micro in range(self.microbatches):
                is_last = micro == self.microbatches - 1
                net.slow = slow if self.rank == culprit and is_last == (slow != "microbatches") else ""
                net.slow = "forward" if net.slow == "microbatches" else net.slow
                with contextlib.nullcontext() if is_last else self.model.no_sync():
                    self.model(torch.ones(2, 16)).sum().backward()

    def until_told(self, expected, culprit=-1, slow=""):
        """Train until rank 0 hears of this, perhaps after the end of the last, and no other rank hears of anything."""
        for _ in range(MOST_STEPS // 20):
            self.steps(20, culprit, slow)
            told, *others = gathered(list(self.told))
            assert not any(others)
            told = [each for each in told if each[1] != "over" or each == expected]
            if told:
                assert told == [expected], (told, expected)
                self.told.clear()
                return
        raise AssertionError(f"{expected} was not named in {MOST_STEPS} steps")


@pytest.mark.parametrize(("transport", "world_size"), [("shm", 3), ("c10d", 2)])
@on_ranks()
def test_each_cause_is_named_and_the_end(rank, transport, world_size):
    lines = logged("torchddp.straggler")
    last = world_size - 1
    training = Training(rank, DDP(Net(), transport=transport))
    training.until_told((last, "data"), last, "data")
    training.until_told((last, "forward"), last, "forward")
    training.until_told((0, "backward"), 0, "backward")
    training.until_told((0, "over"))
    if rank > 0:
        assert lines == []
        return
    words = ["between its steps (data, optimizer)", "in forward", "in backward"]
    named = [line for line in lines if "no longer" not in line]
    for line, expected in zip([*named, lines[-1]], [*words, "rank 0 no longer makes the others wait"], strict=True):
        assert expected in line


@on_ranks(2)
def test_late_buckets_are_told(rank):
    """The layer that is slow lies between the two buckets in backward."""
    lines, told = logged("torchddp.straggler"), []
    listen(lambda notice: told.append(notice.details))
    training = Training(rank, DDP(Net(), bucket_cap_mb=1e-4))
    training.model.module.more_s = more_s = 0.1  # the times are means of a few steps, and a busy machine pauses ranks
    training.until_told((1, "backward"), 1, "backward")
    if rank > 0:
        return
    assert re.search(
        r"bucket 0 by -?[0-9.]+ ms, bucket 1 by [0-9.]+ ms. The others wait longest for bucket 1: ", lines[0]
    )
    first, second = told[0]["ready_later_s"]
    assert abs(first) < more_s / 2 < second < 10 * more_s
    first, second = told[0]["others_wait_s"]
    assert first < more_s / 2 < second < 10 * more_s


@on_ranks(2)
def test_a_slow_sender_is_named(rank):
    def hook(state, bucket):
        averages, buffer = torch.futures.Future(), bucket.buffer()
        work = dist.all_reduce(buffer, async_op=True)

        def send():  # not in backward, as a callback of an operation that is over already would be
            work.wait()
            time.sleep(BASE_S + MORE_S * (rank == 1))
            averages.set_result(buffer / 2)

        threading.Thread(target=send).start()
        return averages

    model = DDP(Net(), transport="c10d")
    model.register_comm_hook(None, hook)
    Training(rank, model).until_told((1, "sending"), -1)


@pytest.mark.rest_is_thorough("microbatches", "static", "buffers", "regrouped", "join")
@pytest.mark.parametrize(
    "case", ["microbatches", "static", "unused", "buffers", "refreshed", "thawed", "regrouped", "join", "evaluated"]
)
@on_ranks(2)
def test_modes(rank, case):
    """A rank that is slow between its steps is named where others wait for it in their forward, too."""
    options = {"static": {"static_graph": True}, "unused": {"find_unused_parameters": True}}
    options["refreshed"] = {"auto_refresh_trainable": True}
    model = DDP(Net(*[nn.BatchNorm1d(16)] * (case == "buffers")), **options.get(case, {}))
    training = Training(rank, model, microbatches=2 if case == "microbatches" else 1)
    part = "microbatches" if case == "microbatches" else "data"
    training.steps(3)
    if case == "thawed":
        model.module.first[0].weight.requires_grad_(False)
        model.refresh_trainable()
    if case == "regrouped":
        model.update_process_group(dist.new_group(list(range(2))))
    if case == "evaluated":
        model.eval()
        with torch.no_grad():
            model(torch.ones(1, 16))
    with model.join() if case == "join" else contextlib.nullcontext():
        training.until_told((0, part), 0, part)


@on_ranks(2)
def test_rare_work_on_rank_0_is_not_named(rank):
    training = Training(rank, DDP(Net()))
    for _ in range(4):
        training.steps(40)
        if rank == 0:
            time.sleep(0.8)
    assert training.told == []


@on_ranks(2)
def test_two_models(rank):
    first, second = (Training(rank, DDP(Net())) for _ in range(2))
    second.model.module.more_s = 5 * MORE_S  # each model's step lasts as long as both
    for _ in range(MOST_STEPS):
        first.steps(1)
        second.steps(1, 1, "forward")
        if gathered((1, "forward") in second.told)[0]:  # on a busy machine, something else may be told before
            return
    raise AssertionError(second.told)


@on_ranks(2)
def test_where_there_is_none(rank):
    for checks in ("off", Checks(stragglers=False)):
        assert DDP(Net(), checks=checks).observers.get("stragglers") is None
    alone = [dist.new_group([each]) for each in range(2)]
    assert DDP(Net(), process_group=alone[rank]).observers.get("stragglers")._exchange is None
    model = DDP(Net())
    exchange = model.observers.get("stragglers")._exchange
    for _ in range(200):
        model(torch.ones(2, 16)).sum().backward()
    assert wait_until(lambda: exchange._posted >= 0)
    del model
    gc.collect()
    assert wait_until(lambda: exchange._task.closed)
    model = DDP(Net())
    exchange = model.observers.get("stragglers")._exchange
    dist.barrier()
    dist.destroy_process_group()
    assert wait_until(lambda: exchange._task.closed)


def _burn(seed):
    """Busy for up to 5 s, then idle for up to 1 s."""
    torch.manual_seed(seed)
    while True:
        busy_s, idle_s = (torch.rand(2) * torch.tensor([5.0, 1.0])).tolist()
        until_s = time.monotonic() + busy_s
        while time.monotonic() < until_s:
            pass
        time.sleep(idle_s)


@pytest.mark.slow
@pytest.mark.rest_is_thorough("shm")
@over_both
def test_equal_ranks_are_not_named_under_load(transport):
    context = multiprocessing.get_context("fork")
    burners = [context.Process(target=_burn, args=(seed,), daemon=True) for seed in range(3)]

    def work(rank):
        torch.manual_seed(0)
        model = DDP(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), transport=transport)
        told = []
        listen(lambda notice: told.append(notice.details))
        for _ in range(10_000):
            model(torch.ones(16, 64)).sum().backward()
        return told

    for burner in burners:
        burner.start()
    try:
        assert run_ranks(work, 2, timeout=550) == [[], []]
    finally:
        for burner in burners:
            burner.kill()
            burner.join()
