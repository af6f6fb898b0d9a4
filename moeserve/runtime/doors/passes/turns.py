"""`Turns`: in which order steps of several callers' GPUs were launched, and which of them wait for no rows.

Where only lanes of GPUs want steps, each has its next step launched behind the others' before its rows are
there: when one ends the next one begins, and no host is between them. Whose rows do not come in its turn is
left as soon as others' are there, and has a step launched when they are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from enum import Enum
from itertools import takewhile
from typing import Protocol

RECENT = 8
"""Launches back to which a lane counts as one that launches."""


class Company(Enum):
    """Who else wants a rank's steps."""

    NONE = "nobody"
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

    def leave_turn(self) -> None:
        """What waits in its turn is left."""


class Turns:
    """Counts what the lanes of one rank launch. One thread at a time uses it."""

    def __init__(self) -> None:
        self._count = 0
        self._recent = deque[int](maxlen=RECENT)  # lanes that have launched, by id: none is kept for it

    @property
    def count(self) -> int:
        """Launches so far."""
        return self._count

    def launched(self, lane: object) -> int:
        """Notes that `lane` has a run launched; its turn, from 1."""
        self._count += 1
        self._recent.append(id(lane))
        return self._count

    def follows(self, lane: object) -> bool:
        """Whether all others that have launched lately have done so since `lane` did: it is its turn."""
        others = {one for one in self._recent if one != id(lane)}
        return bool(others) and others == set(takewhile(lambda one: one != id(lane), reversed(self._recent)))

    @staticmethod
    def leave(lanes: Iterable[TakesTurns]) -> None:
        """Has those left that wait in their turn before others whose rows are there."""
        there = list(lanes)
        ready = max((lane.ready_turn for lane in there), default=-math.inf)
        for lane in there:
            if 0 < lane.waiting_turn < ready:
                lane.leave_turn()
