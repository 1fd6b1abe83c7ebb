"""Which ranks are left, when some have died and the others go on without them."""

from __future__ import annotations

import time

import torch.distributed as dist

from torchddp import _torch
from torchddp.diagnose.monitor import open_monitor_of
from torchddp.durations import Duration, seconds
from torchddp.errors import TransportError
from torchddp.transport.store import Board, home_of
from torchddp.transport.waits import GONE, check_not_forked, look_up, peers_of

_MOMENT_S = 0.005
_CALL_S = 0.1  # after which a rank that lives is taken to wait for one that has given up
_ANSWER_S = 5.0  # from the end of the wait to the answer of the rank that gives it


def survivors(process_group: dist.ProcessGroup | None = None, *, within_s: Duration = 10.0) -> list[int]:
    """The ranks of a process group that still run, as numbers of the default group, in order; equal on all of them.

    Example:

        except torchddp.TransportError:
            ranks = torchddp.survivors(model.process_group)
            model.update_process_group(dist.new_group(ranks, use_local_synchronization=True))

    Collective among the survivors, which call it once they have got a TransportError. They report to each other through
    the store of the group, whose host must be alive (torchrun hosts it outside of the ranks). It returns as soon as
    every rank of the group has called it, or is known to be dead: this host's are known at once, those of other hosts,
    and any that died before the first model was wrapped, after ``within_s`` seconds (or a timedelta). A rank that still
    waits in a model's step, for one that has called this, gets its TransportError within about a second, from the
    thread of the hang reports.

    Raises:
        TransportError: this rank came later than that, and the others have gone on without it; or the store's host does
            not answer.
        TypeError, ValueError: ``within_s`` is not a duration, negative or NaN.
    """
    limit_s = seconds(within_s, "within_s")
    group = process_group or dist.group.WORLD
    if group is None or limit_s is None:
        raise ValueError("survivors() needs a process group and a time limit: call init_process_group() first")
    check_not_forked(group)
    try:
        found, groups = _agree(Board(group, "survivors"), group, limit_s)
    except RuntimeError as error:
        if isinstance(error, TransportError):
            raise
        raise TransportError(
            f"rank {dist.get_rank()}: survivors() can't reach the other ranks' store. {error}"
        ) from error
    ranks = [dist.get_global_rank(group, rank) for rank in found]
    if group.rank() not in found:
        raise TransportError(
            f"rank {dist.get_rank()} called survivors() later than {limit_s:g} s after the others, which have gone on "
            f"without it (ranks {', '.join(map(str, ranks))})"
        )
    _torch.skip_to_group(groups)
    return ranks


def _agree(board: Board, group: dist.ProcessGroup, limit_s: float) -> tuple[list[int], int]:
    """The survivors, and the most groups that one of them has created.

    torch names a group that some ranks create by that number: those that were in fewer would wait under another name.
    """
    begun_s = time.monotonic()
    until_s = begun_s + limit_s
    known = peers_of(group)
    monitor = open_monitor_of(home_of(group))
    departure = board.name()
    if monitor is not None:
        monitor.join_departure(departure)
    here = {board.rank: _torch.groups_created()}
    board.post_own("here", here[board.rank])
    while (found := board.read("found")) is None:
        others = [rank for rank in range(board.size) if rank not in here]
        here.update((rank, groups) for rank in others if (groups := board.read(f"here/{rank}")) is not None)
        left_out = [rank for rank in others if rank not in here]
        is_late = time.monotonic() > until_s
        all_dead = all(rank < len(known) and look_up(known[rank]) == GONE for rank in left_out)
        if (is_late or all_dead) and board.claim("found"):
            board.post("found", [sorted(here), max(here.values())])
        elif time.monotonic() > until_s + _ANSWER_S:
            raise TransportError(f"rank {dist.get_rank()}: the rank that coordinates the list of survivors died")
        elif monitor is not None and time.monotonic() > begun_s + _CALL_S:
            monitor.call_to_depart(departure, dist.get_process_group_ranks(group))
            monitor = None
        time.sleep(_MOMENT_S)
    ranks, groups = found
    return [int(rank) for rank in ranks], int(groups)
