"""Runs a function on several ranks: forked processes, gloo over the loopback interface, never a hang.

CUDA does not survive a fork: ranks that need a GPU are started with `start_method="spawn"`, which imports everything
again in each of them, and run a function that can be pickled.

Ranks are forked from the test process, so nothing is imported twice and a two-rank run costs about 60 ms. That works
because the test process itself never runs a backward (autograd refuses to work in the child of a process that did):
whatever needs autograd runs inside `run_ranks`.

`TORCHDDP_TEST_CLASS=torch.nn.parallel.DistributedDataParallel` tests another class; the tests of what only torchddp
does (marker `beyond_torch`) are then expected to fail.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import io
import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # imported here once: otherwise DDP's constructor imports it in each rank (one second each)
import torch.distributed as dist

import torchddp

OWN_CLASS = "torchddp.DistributedDataParallel"
CLASS_ENV = "TORCHDDP_TEST_CLASS"
STRAGGLER_S = 30.0  # how long the other ranks may run after one has failed
LIMIT_S = 240.0  # of all ranks: those that take as long have hung
GROUP_TIMEOUT_S = 300.0  # of an operation: a test in which a rank waits for it hangs
over_both = pytest.mark.parametrize("transport", ["shm", "c10d"])


def class_under_test() -> type[torch.nn.Module]:
    """The class named by TORCHDDP_TEST_CLASS, by default torchddp's own."""
    module_name, _, name = os.environ.get(CLASS_ENV, OWN_CLASS).rpartition(".")
    return getattr(importlib.import_module(module_name), name)


def is_own_class() -> bool:
    """Whether the class under test is torchddp's."""
    return os.environ.get(CLASS_ENV, OWN_CLASS) == OWN_CLASS


@dataclass
class Outcome:
    """How one rank ended: a value, an error with its traceback, or a signal."""

    rank: int
    value: Any = None
    error: str | None = None
    exit_code: int | None = None
    finished_s: float | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit_code == 0


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list[Any]:
    """Calls `fn(rank, *args)` on `world_size` ranks and returns their values in rank order.

    Raises AssertionError with the rank and its traceback if any rank (or any of `needed_ranks`) raises, dies or doesn't
    return in time. The keywords are those of `run_outcomes`.
    """
    outcomes = run_outcomes(fn, world_size, *args, **kwargs)
    bad = [o for o in outcomes if not o.ok and o.rank in (kwargs.get("needed_ranks") or range(world_size))]
    if bad:
        # The rank that failed first is the cause; the others mostly report a lost peer.
        bad.sort(key=lambda o: o.finished_s if o.finished_s is not None else float("inf"))
        raise AssertionError("\n".join(f"--- rank {o.rank} (exit code {o.exit_code}):\n{o.error}" for o in bad))
    return [o.value for o in outcomes]


def on_ranks(*world_sizes: int, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Turns a function into a test that runs it on each rank, with `rank` and `world_size` if it takes them.

    Several sizes parametrize the test; without any, the test takes `world_size` from its own parameters or fixtures.
    The options are those of `run_ranks`.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        takes = list(inspect.signature(body).parameters)
        parametrized = len(world_sizes) != 1
        asked_for = [name for name in takes if name not in ("rank", "world_size")]
        asked_for += ["world_size"] * parametrized

        @functools.wraps(body)
        def test(**given: Any) -> None:
            world_size = given["world_size"] if parametrized else world_sizes[0]

            def work(rank: int) -> None:
                values = {"world_size": world_size, **given, "rank": rank}
                body(**{name: values[name] for name in takes})

            run_ranks(work, world_size, **options)

        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in asked_for]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which pytest inspects
        return pytest.mark.parametrize("world_size", world_sizes)(test) if len(world_sizes) > 1 else test

    return decorate


def each(*choices: Iterable[Any]) -> Iterator[Any]:
    """Several cases in one launch: yields all combinations and prints each, so a failed test prints its case last."""
    for found in itertools.product(*choices):
        print("case:", *found, flush=True)
        yield found if len(choices) > 1 else found[0]


def errors_of(
    calls: dict[str, Callable[[], Any]], rank: int, world_size: int, timeout_s: float = GROUP_TIMEOUT_S
) -> dict[str, tuple[list[str], str]]:
    """By name, the MRO of the exception that the call raises and its text; ([], "") if it raises nothing.

    Each call has its own process group, which all ranks enter and leave together.
    """
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    found: dict[str, tuple[list[str], str]] = {}
    for name, call in calls.items():
        print("case:", name, flush=True)  # if a rank dies, the last one printed is the cause
        with process_group(dist.PrefixStore(name, store), rank, world_size, timeout_s) as group:
            dist.barrier()  # all must have connected before a finished rank leaves
            try:
                call()
                found[name] = [], ""
                keep_alive(group)
            except BaseException as error:
                found[name] = [kind.__name__ for kind in type(error).__mro__ if kind is not object], str(error)
            gc.collect()  # free models before their group, as attempt() does
        store.set(f"{name}/{rank}", "")
        store.wait([f"{name}/{peer}" for peer in range(world_size)])
    return found


def run_outcomes(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = LIMIT_S,
    group_timeout_s: float = GROUP_TIMEOUT_S,
    straggler_s: float = STRAGGLER_S,
    needed_ranks: Collection[int] | None = None,
    start_method: str = "fork",
    backend: str = "gloo",
) -> list[Outcome]:
    """Like run_ranks, but returns how each rank ended instead of raising.

    With `needed_ranks` it returns as soon as those have finished: the others may be dead or stopped on purpose.
    """
    needed = set(range(world_size) if needed_ranks is None else needed_ranks)
    context = multiprocessing.get_context(start_method)
    with tempfile.TemporaryDirectory(prefix="torchddp_test_") as folder:
        group = (f"{folder}/store", world_size, group_timeout_s, backend)
        ranks = [_Rank(rank, context, Path(folder) / f"stacks{rank}", fn, args, group) for rank in range(world_size)]
        try:
            _collect(ranks, needed, timeout, straggler_s)
        finally:
            for rank in ranks:
                rank.end()
    return [rank.outcome for rank in ranks]


def gathered(value: Any) -> list[Any]:
    """The values of all ranks, in rank order (collective)."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def reductions(count: int) -> Iterator[None]:
    """Assert that this process's reducers of ours finish so many steps in the block."""
    before = torchddp.finished_steps()
    yield
    assert torchddp.finished_steps() - before == count


def future_of(value: Any = None, error: Exception | None = None) -> Any:
    """A completed future, as a communication hook returns it."""
    future: Any = torch.futures.Future()
    future.set_result(value) if error is None else future.set_exception(error)
    return future


def stay(rank: int) -> None:
    """Keep the other ranks' connections open until rank 0 gets here."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("rank 0 is done", "")
    else:
        store.wait(["rank 0 is done"])


def status_bytes(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def in_child(body: Callable[[], Any]) -> bool:
    """Fork a child and return whether `body` finished in it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(120)
            body()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def logged(logger: str = "torchddp") -> list[str]:
    """A list that collects the messages which this process logs from now on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    return messages


def through_a_file(value: Any, weights_only: bool = True) -> Any:
    """Save a checkpoint or a model and load it again."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def assert_each_raises(*cases: tuple[Callable[[], Any], type[Exception], str]) -> None:
    """Each case is a call, the exact class of its error, and words in its text."""
    for number, (call, kind, words) in enumerate(cases):
        with pytest.raises(kind) as caught:
            call()
        assert type(caught.value) is kind and words in str(caught.value), f"case {number}: {caught.value!r}"


class _Rank:
    """A rank's process, the pipe for its outcome, and the file to which it writes its stacks on SIGUSR1."""

    def __init__(self, rank: int, context: Any, stacks_path: Path, *launch: Any) -> None:
        self.outcome = Outcome(rank)
        self.stacks_path = stacks_path
        self.started_s = time.monotonic()
        self.pipe, child_end = context.Pipe(duplex=False)
        self.process = context.Process(target=_rank_main, args=(rank, child_end, stacks_path, *launch), daemon=True)
        self.process.start()
        child_end.close()

    @property
    def done(self) -> bool:
        return self.outcome.finished_s is not None

    def read(self) -> None:
        """Read the outcome from the pipe; if the pipe closes empty, the rank died."""
        try:
            self.outcome.value, self.outcome.error = pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            self.process.join(STRAGGLER_S)
            self.outcome.error = f"died without an error message, exit code {self.process.exitcode}"
        self.outcome.finished_s = time.monotonic() - self.started_s

    def give_up(self, why: str) -> None:
        """Record an error with the rank's Python stacks."""
        stacks = ""
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid or 0, signal.SIGUSR1)
            time.sleep(0.3)
            stacks = self.stacks_path.read_text() if self.stacks_path.exists() else ""
        self.outcome.error = f"{why}\n{stacks}"

    def end(self) -> None:
        """Wait for the rank to exit if it has an outcome; otherwise kill it."""
        if self.done:
            self.process.join(STRAGGLER_S)
        if self.process.is_alive():
            if self.done and self.outcome.error is None:
                self.outcome.error = "did not exit after its work was done"
            self.process.kill()
            self.process.join()
        self.outcome.exit_code = self.process.exitcode
        if self.outcome.error is None and self.outcome.exit_code != 0:
            self.outcome.error = f"exit code {self.outcome.exit_code} after its work was done"
        self.pipe.close()


def _collect(ranks: list[_Rank], needed: set[int], timeout: float, straggler_s: float) -> None:
    deadline = time.monotonic() + timeout
    failed = False
    while any(rank.outcome.rank in needed and not rank.done for rank in ranks):
        pending = {rank.pipe: rank for rank in ranks if not rank.done}
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            why = "still running after another rank failed" if failed else f"not back after {timeout} s"
            for rank in pending.values():
                rank.give_up(why)
            return
        for pipe in wait(list(pending), left_s):
            rank = pending[pipe]  # type: ignore[index]
            rank.read()
            if rank.outcome.error is not None and rank.outcome.rank in needed and not failed:
                failed = True
                deadline = min(deadline, time.monotonic() + straggler_s)


def _rank_main(
    rank: int, pipe: Connection, stacks_path: Path, fn: Callable[..., Any], args: tuple, group_of: tuple[Any, ...]
) -> None:
    # Never collect the parent's garbage: destructors of stores and groups would wait for threads lost in fork().
    gc.freeze()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with stacks_path.open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        value, error = None, None
        try:
            store_path, world_size, *how = group_of
            with process_group(dist.FileStore(store_path, world_size), rank, world_size, *how) as group:
                value, error = attempt(fn, rank, *args)
                if error is None:
                    keep_alive(group)
        except BaseException:
            error = traceback.format_exc()
        pipe.send_bytes(pickle.dumps((value, error)))
        pipe.close()
        faulthandler.unregister(signal.SIGUSR1)
    if error is None and multiprocessing.get_start_method(allow_none=True) == "spawn":
        # Like a forked rank, skip the interpreter's shutdown, during which gloo's threads may want the GIL and abort.
        os._exit(0)


def attempt(fn: Callable[..., Any], *args: Any) -> tuple[Any, str | None]:
    """Return the value of the call, or its traceback.

    The traceback's frames are freed on return: a model that outlived its process group would destroy the group's
    threads from its own destructor, where torch's Reducer holds the GIL and may wait forever.
    """
    try:
        return fn(*args), None
    except BaseException:
        error = traceback.format_exc()
    gc.collect()
    return None, error


_KEPT: deque[Any] = deque(maxlen=64)


def keep_alive(group: Any) -> None:
    """Keep this group until 64 others were given, or for ever: the process exits without running destructors.

    A hook's closure may hold the group, and gloo's worker thread may drop the last reference to the closure. It would
    then join itself and abort the process, with any DDP class. After an error, destroy the group so that peers see the
    connection close.
    """
    _KEPT.append(group)


@contextlib.contextmanager
def process_group(
    store: dist.Store, rank: int, world_size: int, timeout_s: float = GROUP_TIMEOUT_S, backend: str = "gloo"
) -> Iterator[dist.ProcessGroup | None]:
    """Make the default process group; destroy it at the end unless the body has."""
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
    group = dist.group.WORLD  # the last reference, so that the group is destroyed without the GIL
    try:
        yield group
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
