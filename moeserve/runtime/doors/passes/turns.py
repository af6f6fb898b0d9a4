"""`Turns`: in which order steps of several callers' GPUs were launched, and which of them wait for no rows.

Where only lanes of GPUs want steps, each has its next step launched behind the others' before its rows are
there: when one ends the next one begins, and no host is between them. Whose rows do not come in its turn is
left as soon as others' are there, and has a step launched when they are.

Lanes whose steps have few rows and those of more have a track each, and turns of their own. While both
flow, a step leaves room on the device for one of the other track's that waits for its rows. A lane that has
its track for itself takes no turns: whole forward passes of it are launched ahead, beside the others'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum
from itertools import takewhile
from typing import Protocol

RECENT = 8
"""Launches on a track back to which a lane counts as one that launches there."""


class Company(Enum):
    """Who else wants a rank's steps."""

    NONE = "nobody"
    BESIDE = "lanes of other GPUs on the other track alone"
    LANES = "lanes of other GPUs alone"
    CALLS = "calls, or lanes of rows in host memory"


class TakesTurns(Protocol):
    """A lane, as others' turns depend on it."""

    @property
    def waiting_turn(self) -> int:
        """Of a step that was launched in its turn and waits for its rows; 0: there is none."""

    @property
    def ready_turn(self) -> float:
        """Of its last run whose rows are there; infinite: it is not launched yet. 0: there is none."""

    @property
    def short(self) -> bool:
        """Whether its steps are on the track of those of few rows."""

    @property
    def ready_beside(self) -> bool:
        """Whether its last run whose rows are there has room beside one of the other track's that waits."""

    @property
    def beside(self) -> bool:
        """Whether what waits in its turn keeps nobody of the other track waiting."""

    def leave_turn(self) -> None:
        """What waits in its turn is left."""


class Turns:
    """Counts what the lanes of one rank launch. One thread at a time uses it."""

    def __init__(self) -> None:
        self._count = 0
        # by track, lanes that have launched on it, by id: none is kept for it
        self._recent = deque[int](maxlen=RECENT), deque[int](maxlen=RECENT)
        self.flows = [False, False]  # by track: whether a lane's caller has wanted its steps lately

    @property
    def count(self) -> int:
        """Launches so far."""
        return self._count

    def launched(self, lane: object, *, short: bool = False) -> int:
        """Notes that `lane` has a run launched; its turn, from 1."""
        self._count += 1
        self._recent[short].append(id(lane))
        return self._count

    def apart(self, *, short: bool) -> bool:
        """Whether steps flow on the other track, too."""
        return self.flows[not short]

    def follows(self, lane: object, *, short: bool = False) -> bool:
        """Whether all others that have launched on the track lately have done so since `lane` did: it is its
        turn. Where there are none, whether steps flow on the other one.
        """
        recent = self._recent[short]
        others = {one for one in recent if one != id(lane)}
        if not others:
            return self.apart(short=short)
        return others == set(takewhile(lambda one: one != id(lane), reversed(recent)))

    @staticmethod
    def leave(lanes: Iterable[TakesTurns]) -> None:
        """Has those left that wait in their turn, and keep others waiting whose rows are there."""
        there = list(lanes)
        ready = [(lane.ready_turn, lane.short, lane.ready_beside) for lane in there]
        for lane in there:
            if (turn := lane.waiting_turn) <= 0:
                continue
            short, beside = lane.short, lane.beside
            if any(turn < one for one, where, fits in ready if where == short or not (beside and fits)):
                lane.leave_turn()
