"""`Draining`: lanes that begin no further call, and which of them have said that no call is under way."""

from __future__ import annotations

from moeserve.runtime.control.stream import Message
from moeserve.runtime.head.group import Group
from moeserve.runtime.head.reception import Seat


class Draining:
    """The caller of any method holds the group's lock."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._told: Message | None = None  # what members were told, also those that come later
        self.drained = set[int]()  # seats whose calls have ended since
        self._noted: dict[int, Seat] = {}  # processes whose lanes may have calls under way
        self._again = False  # lanes take calls again

    @property
    def begun(self) -> bool:
        """Whether this head has told the members to begin no further call."""
        return self._told is not None

    @property
    def over(self) -> bool:
        """Whether no call is under way on any member's lane."""
        return self.drained >= set(self._group.members.seats)

    @property
    def lost(self) -> list[int]:
        """Seats whose process, noted before, has gone while calls may have been under way on its lane."""
        return sorted(rank for rank, seat in self._noted.items() if self._group.seats.get(rank) is not seat)

    def note_lanes(self) -> None:
        """Takes note of the processes that are there now: `lost` tells which of them have gone since."""
        self._noted = dict(self._group.seats)

    def take_again(self) -> None:
        """Has lanes take calls again, until the next `begin`."""
        self._told, self._again = None, True
        told = {"kind": "drain", "generation": self._group.generation, "reason": "", "seconds": 0.0}
        self._group.broadcast(told)
        self.note_lanes()

    def begin(self, seconds: float, reason: str) -> None:
        """Tells every member's lane to begin no further call, and how long those under way have."""
        told = {"kind": "drain", "generation": self._group.generation, "reason": reason}
        self._told, self._again = told | {"seconds": seconds}, False
        self.drained.clear()  # what lanes said of an earlier scale does not count
        self._group.broadcast(self._told)

    def greet(self, rank: int, seat: Seat) -> None:
        """Tells a process that has taken a seat what the others were told before it came."""
        self.drained.discard(rank)  # it is another process
        if self._told is not None:
            self._group.send(seat, self._told)

    def ended(self, rank: int) -> None:
        """A member says that the calls on its lane have ended."""
        self.drained.add(rank)
        if not self._again:  # else it was said before the lane took calls again, and came late
            self._noted.pop(rank, None)
        self._group.lock.notify_all()
