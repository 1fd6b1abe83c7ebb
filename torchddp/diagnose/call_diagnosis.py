"""Turns the torch.distributed calls that ranks are in into a sentence about which ranks differ. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path

from torchddp.diagnose.rank_state import CallState, GroupCalls, RankState, ranks_text, user_part

Clause = tuple[str, list[int]]

_ORDINALS = {1: "st", 2: "nd", 3: "rd"}
_ROOTED = ("broadcast", "scatter", "broadcast_object_list", "scatter_object_list", "reduce", "gather", "gather_object")


class CallDiagnosis:
    """A diagnosis of rank states, at least one of which is in a call.

    Attributes:
        waiting: the call of each rank that is in one.
        concerned: those ranks, and the ranks they wait for.

    Args:
        silent: returns why a rank has not answered.
        exception: returns the exception that a rank is handling or has ended with, if it explains a wait of this many
            seconds; else empty.
    """

    def __init__(
        self,
        states: list[RankState],
        silent: Callable[[RankState], str],
        exception: Callable[[RankState, float], str],
    ) -> None:
        self._states = {state.rank: state for state in states}
        self._silent, self._exception = silent, exception
        self.waited_s = max(state.longest_call_s for state in states)
        # The last rank to arrive has waited less than the others.
        self.waiting = {state.rank: call for state in states if (call := state.call) is not None}
        by_length = sorted(self.waiting, key=lambda rank: (-self.waiting[rank].waited_s, rank))
        self.first = self.waiting[by_length[0]]
        self.concerned = sorted({*self.waiting, *(r for rank in self.waiting for r in self._waited_for_by(rank))})
        self.concerned = [rank for rank in self.concerned if rank in self._states]

    def group_of(self, call: CallState) -> GroupCalls | None:
        return next((s.groups[call.group] for s in self._states.values() if call.group in s.groups), None)

    def _waited_for_by(self, rank: int) -> list[int]:
        call = self.waiting[rank]
        if call.number == 0 and call.peers:
            peers = [peer for _, peer in call.peers if peer >= 0]
            if peers:
                return peers
        group = self.group_of(call)
        return group.ranks if group is not None else []

    # --- the sentence ---

    def headline(self) -> str:
        clauses = self.clauses()
        text = ", ".join(f"{ranks_text(ranks)} {what}" for what, ranks in clauses)
        if differs := self.difference():
            text += f": {differs}"
        elif not self.culprits():
            text += ": no rank is known to be missing: the network, or a rank's device?"
        return f"{text}; the longest wait is {self.waited_s:.3g} s"

    def clauses(self) -> list[Clause]:
        """What each rank is doing: calls first, starting with the one with the fewest ranks."""
        shows_shape, shows_peers = self._differ_in("shape"), self._differ_in("peers")
        texts = {
            rank: self._call_text(call, shows_shape=shows_shape, shows_peers=shows_peers)
            for rank, call in self.waiting.items()
        }
        calls = self._by_text((texts[rank], rank) for rank in sorted(self.waiting))
        calls.sort(key=lambda clause: (len(clause[1]), -clause[1][0]))
        clauses: list[Clause] = []
        said = None
        for text, ranks in calls:
            call = self.waiting[ranks[0]]
            where = (call.group, call.number)
            verb = ("waits " if len(ranks) == 1 else "wait ") if not clauses else ""
            clauses.append((f"{verb}{text}{'' if where == said else self._number_text(call)}", ranks))
            said = said or where
        others = [rank for rank in self.concerned if rank not in self.waiting]
        return [*clauses, *self._by_text((self._elsewhere(self._states[rank]), rank) for rank in others)]

    def why(self, rank: int) -> str:
        """A rank's part of the sentence, alone."""
        call = self.waiting.get(rank)
        if call is None:
            return self._elsewhere(self._states[rank])
        return f"waits {self._call_text(call, shows_shape=True, shows_peers=True)}{self._number_text(call)}"

    def culprits(self) -> list[int]:
        """Ranks that others wait for: those in no call, or else those in a different call than most."""
        absent = [rank for rank in self.concerned if rank not in self.waiting]
        if absent:
            return absent
        same = self._by_text((repr(self._signature(call)), rank) for rank, call in self.waiting.items())
        if len(same) == 1:
            return []
        most = max(len(ranks) for _, ranks in same)
        fewer = sorted(rank for _, ranks in same if len(ranks) < most for rank in ranks)
        return fewer or sorted(self.waiting)

    def waits_for(self) -> str:
        held = [call for rank, call in self.waiting.items() if rank not in self.culprits()] or [self.first]
        return f"{held[0].function}{self._number_text(held[0])}"

    # --- parts of it ---

    def difference(self) -> str:
        """'they differ from call 4 on', if ranks have called a group in different orders."""
        for key in dict.fromkeys(call.group for call in self.waiting.values()):
            ranks = [rank for rank in self.concerned if key in self._states[rank].groups]
            number = self._first_difference(key, ranks)
            if number is None:
                continue
            text = f"they differ from call {number} on"
            now = [call for call in self.waiting.values() if call.group == key]
            if any(call.number != number for call in now) or len({call.group for call in self.waiting.values()}) > 1:
                parts = self._by_text((self._past_text(key, rank, number), rank) for rank in ranks)
                shown = ", ".join(f"{ranks_text(who)} {what}" for what, who in parts if what)
                text += f" of {self._title(key)} ({shown})"
            return text
        return ""

    def _first_difference(self, key: str, ranks: list[int]) -> int | None:
        """The number of the group's first call in which ranks differ, as far as they still remember it."""
        functions: dict[int, set[str]] = {}
        for rank in ranks:
            for row in self._states[rank].groups[key].recent:
                functions.setdefault(row[0], set()).add(row[1])
        for number in sorted(functions):
            if len(functions[number]) > 1:
                return number
        last = {(call.number, call.function) for call in self.waiting.values() if call.group == key}
        if len(last) == 1 and len({call.shape for call in self.waiting.values() if call.group == key}) > 1:
            return next(iter(last))[0] or None
        return None

    def _past_text(self, key: str, rank: int, number: int) -> str:
        row = next((row for row in self._states[rank].groups[key].recent if row[0] == number), None)
        return "" if row is None else f"called {row[1]} at {Path(row[2]).name}:{row[3]}"

    def _call_text(self, call: CallState, *, shows_shape: bool, shows_peers: bool) -> str:
        text = f"in {call.function}"
        if shows_shape and call.shape:
            text += f" of {call.shape}"
        if call.peers and (call.number == 0 or shows_peers):
            text += " " + " and ".join(
                f"{way} {ranks_text(peers) if peers else 'any rank'}" for way, peers in _peers_by_way(call.peers)
            )
        text += f" {self._place(call.file, call.line)}"
        if call.waits_at is not None:
            text += f", waited for {self._place(*call.waits_at)}"
        return text

    def _number_text(self, call: CallState) -> str:
        group = self.group_of(call)
        if group is None:
            return ""
        return f" ({ordinal(call.number)} on {group.title})" if call.number else f" ({group.title})"

    def _title(self, key: str) -> str:
        return next(state.groups[key].title for state in self._states.values() if key in state.groups)

    @staticmethod
    def _place(file: str, line: int) -> str:
        return f"at {Path(file).name}:{line}" if file else "on a library's thread"

    def _elsewhere(self, state: RankState) -> str:
        """What a rank that is in no call is doing."""
        if not state.answered:
            return self._silent(state)
        where = user_part(state.stack)
        text = (
            f"is at {Path(where[-1].file).name}:{where[-1].line} in {where[-1].function}" if where else "is elsewhere"
        )
        if not state.stack:
            text = "is elsewhere: its training thread has ended"
        text += self._exception(state, self.waited_s)
        key = next((call.group for call in self.waiting.values() if call.group in state.groups), None)
        if key is None:
            return text
        group = state.groups[key]
        if not group.recent:
            return f"{text}, and has called nothing on {group.title}"
        number, function, file, line, _ = group.recent[-1]
        last = f"{function} {self._place(file, line)}"
        return f"{text}; its last call on {group.title} was the {ordinal(number)}, {last}"

    def _differ_in(self, what: str) -> bool:
        """Whether otherwise equal calls differ in this; if not, it is not mentioned."""
        of_call: dict[tuple[str, int, str], list[object]] = {}
        for call in self.waiting.values():
            if call.number and (what != "peers" or call.function in _ROOTED):
                of_call.setdefault((call.group, call.number, call.function), []).append(getattr(call, what))
        return any(value != values[0] for values in of_call.values() for value in values)

    @staticmethod
    def _signature(call: CallState) -> tuple[object, ...]:
        return call.group, call.number, call.function, call.shape, call.peers if call.function in _ROOTED else None

    @staticmethod
    def _by_text(pairs: Iterable[tuple[str, int]]) -> list[Clause]:
        """By text, in the order of the first ranks."""
        found: dict[str, list[int]] = {}
        for text, rank in pairs:
            found.setdefault(text, []).append(rank)
        return list(found.items())


def call_in(state: RankState) -> str:
    """'barrier at save.py:33 (4th on group "default")', if the rank is known to be in a call."""
    call = state.call
    if call is None:
        return ""
    group = state.groups.get(call.group)
    number = f" ({ordinal(call.number)} on {group.title})" if group is not None and call.number else ""
    return f"{call.function} at {Path(call.file).name}:{call.line}{number}" if call.file else ""


def ordinal(number: int) -> str:
    """'1st', '2nd', '3rd', '4th', '11th', '21st'."""
    ending = "th" if 10 <= number % 100 <= 20 else _ORDINALS.get(number % 10, "th")
    return f"{number}{ending}"


def _peers_by_way(peers: list[tuple[str, int]]) -> list[tuple[str, list[int]]]:
    """The ranks by direction, 'to' or 'from'; an empty list for any rank."""
    ordered = sorted(set(peers))
    return [
        (way, [rank for _, rank in pairs if rank >= 0]) for way, pairs in groupby(ordered, key=lambda pair: pair[0])
    ]
