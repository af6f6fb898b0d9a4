"""`Blame`: a member cannot go on, or nothing goes on: who is to blame, and when the generation has to end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from moeserve.runtime.control.reached import Reached
from moeserve.runtime.head.generations.inquiry import Inquiry, Standstill
from moeserve.runtime.head.group import Group
from moeserve.runtime.head.reception import RankProcess

BLAME_SECONDS = 0.2  # after a rank failed an entry: a peer that died is found by then, and is the cause
LOOK_SECONDS = 0.1  # between looks whether members have answered


class Ending(NamedTuple):
    """Why a generation has to end."""

    reason: str
    guilty: Mapping[int, str]  # seats to part with, and why
    said: bool = False  # by a member that cannot go on; nobody is known to hold it up
    failed: frozenset[int] = frozenset()  # seats that said so


class Blame:
    """What members say of one generation while it stands still, or cannot go on. Its caller holds the group's
    lock; it asks members, and ends nothing itself.
    """

    def __init__(self, group: Group, has_ended: Callable[[RankProcess], bool]) -> None:
        self._group, self._has_ended = group, has_ended
        # when to end, unless a lost rank explains it before; why
        self._failing: tuple[float, str] | None = None
        self._said = set[int]()  # seats that cannot go on
        self._unheard = set[int]()  # seats that have not answered since a member failed
        self._inquiry: Inquiry | None = None  # what members answer while nothing goes on

    @property
    def failing(self) -> bool:
        """Whether a member has said that it cannot go on."""
        return self._failing is not None

    def heard(self, rank: int, reached: Reached | None) -> None:
        """A member answers, and how far it is."""
        self._unheard.discard(rank)
        if self._inquiry is not None and reached is not None:
            self._inquiry.answered(rank, reached)

    def failed(self, rank: int, reason: str, now: float) -> None:
        """A member cannot go on. It may be the one that waited: the first one's word has all others asked."""
        if self._failing is None:
            self._failing = (now + BLAME_SECONDS, reason)
            self._unheard = set(self._group.seats)
            if self._inquiry is not None:
                self._inquiry.asked(now)
            self._ask()
        self._unheard.discard(rank)
        self._said.add(rank)
        if self._inquiry is not None:
            self._inquiry.failed(rank)

    def due(self, standstill: Standstill | None) -> float:
        """When `ending` is to be asked; infinite for never."""
        blamed = math.inf if self._failing is None else self._failing[0]
        if standstill is None:
            return blamed
        return min(blamed, (self._inquiry or Inquiry(standstill, ())).due())

    def ending(self, now: float, standstill: Standstill | None) -> Ending | None:
        """Why the generation has to end now; None while it may go on. `standstill`: what does not go on."""
        if standstill is None or (self._inquiry is not None and self._inquiry.about != standstill):
            self._inquiry = None
        if standstill is not None and (ending := self._inquire(now, standstill)) is not None:
            return ending
        if self._failing is None or self._failing[0] > now:
            return None
        return self._end_failed(now, self._failing[1])

    def _inquire(self, now: float, standstill: Standstill) -> Ending | None:
        """Asks members while nothing goes on; the verdict once that has lasted for too long."""
        inquiry = self._inquiry or Inquiry(standstill, self._group.members.seats)
        if inquiry.due() > now:
            return None
        if not inquiry.complete:
            inquiry.asked(now)
            self._inquiry = inquiry
            self._ask()
        elif inquiry.went_on:
            inquiry.again(now)
        else:
            return _judged(inquiry, "" if self._failing is None else self._failing[1])
        return None

    def _end_failed(self, now: float, reason: str) -> Ending | None:
        """Ends the generation of a member that cannot go on. Where nothing has gone on for long it had waited
        for another, and that one is to blame. Those who have ended, or do not even answer, are named first.
        """
        inquiry = self._inquiry
        if inquiry is not None and inquiry.complete and not inquiry.went_on:
            if inquiry.due() > now:
                self._failing = now + LOOK_SECONDS, reason  # who is slow to answer may be the one
                return None
            return _judged(inquiry, reason)
        seats = sorted(self._group.seats.items())
        named = {rank: f"rank {rank} (pid {seat.pid})" for rank, seat in seats}
        ended = [named[rank] for rank, seat in seats if self._has_ended(seat.process(rank))]
        silent = [who for rank, who in named.items() if rank in self._unheard and who not in ended]
        said = [f"{', '.join(ended)} has ended"] if ended else []
        said += [f"no answer from {', '.join(silent)}"] if silent else []
        return Ending("; ".join([*said, reason]), {}, said=True, failed=frozenset(self._said))

    def _ask(self) -> None:
        """Has members say that they run, and how far they are."""
        self._group.broadcast({"kind": "ask", "generation": self._group.generation})


def _judged(inquiry: Inquiry, said: str) -> Ending:
    """Those who hold up all others are to blame; `said`: what those others say."""
    verdict = inquiry.verdict()
    return Ending("; ".join(filter(None, (verdict.reason, said))), verdict.guilty)
