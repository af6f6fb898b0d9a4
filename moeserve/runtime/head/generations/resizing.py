"""`Resizing`: seats of a running group that are filled or emptied because somebody asked for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from moeserve.dispatch.members import Members
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.generations.generations import DRAINED, Generations
from moeserve.runtime.head.generations.returning import with_ranks
from moeserve.runtime.head.group import Group

log = logging.getLogger(__name__)


class Resizing:
    """Has members come and go while steps run. Each method takes the group's lock, and may wait under it.

    `drained` are the seats that have said that no call is under way on their lanes.
    """

    def __init__(self, group: Group, generations: Generations, drained: set[int]) -> None:
        self._group, self._generations, self._drained = group, generations, drained
        self.draining: frozenset[int] = frozenset()  # seats whose lanes were told to take no further call

    @property
    def wanted(self) -> frozenset[int]:
        """The seats that are to have a process: members', and those of others that are to join."""
        with self._group.lock:
            return frozenset({*self._group.members.seats, *self._generations.turnover.returning.seats})

    def expect(self, seats: Collection[int]) -> None:
        """Reserved seats are to be filled with ranks: whoever takes one loads first, and then joins.

        They get replicas of the experts that have fewest. Raises ValueError for seats that cannot be filled.
        """
        with self._group.lock:
            grown = with_ranks(self._group.epoch, seats)
            self._drained.difference_update(seats)
            self._generations.turnover.coming |= dict.fromkeys(seats, "")
            self._generations.turnover.returning.leave(grown, sorted(seats), time.monotonic())

    def wait_joined(self, seats: Collection[int], seconds: float) -> str:
        """Waits until members have these seats and the group serves; why they do not, or nothing."""
        coming = self._generations.turnover.coming

        def refused() -> list[str]:
            return [why for seat in seats if (why := coming.get(seat, ""))]

        if self._wait(lambda: bool(refused()) or self._are_members(seats), seconds) and not refused():
            return ""
        with self._group.lock:
            away = sorted(set(seats) - set(self._group.members.seats))
            who = f"ranks {away} have not joined" if away else "the group does not serve"
            return "; ".join(refused()) or f"{who} within {seconds:g} s: {self._why()}"

    def forget_orphans(self) -> None:
        """Nobody comes for seats that a head before this one asked for, and that have not joined yet."""
        with self._group.lock:
            for seat in sorted(self._generations.turnover.orphans):
                self._generations.turnover.forget(seat, "the head that asked for it is gone")

    def settle(self, seats: Collection[int]) -> list[int]:
        """Nobody comes for these seats any more, but for those who have joined; returns those who have."""
        with self._group.lock:
            joined = [seat for seat in seats if seat in self._group.members.seats]
            for seat in seats:
                self._generations.turnover.coming.pop(seat, None)
                if seat in self._generations.turnover.returning.seats:
                    self._generations.turnover.forget(seat, "it has not joined in time")
            return joined

    def epoch_without(self, seats: Collection[int]) -> Epoch:
        """The epoch when these members are gone. Raises ValueError where the others cannot serve alone."""
        with self._group.lock:
            return self._generations.turnover.epoch_without(list(seats))

    def leave(self, seats: Collection[int]) -> None:
        """Callers find the lanes of these members no more."""
        with self._group.lock:
            self._generations.turnover.leaving = frozenset(seats)

    def drain(self, seats: Collection[int], seconds: float, reason: str) -> None:
        """Lanes of these members take no further call; waits for calls under way, and no longer than told."""
        with self._group.lock:
            self._drained.difference_update(seats)
            self.draining = frozenset(seats)
            message = {"kind": "drain", "generation": self._group.generation, "reason": reason}
            message |= {"seconds": seconds}
            for seat in seats:
                if seat in self._group.seats:
                    self._group.send(self._group.seats[seat], message)

        def over() -> bool:
            return self._drained >= set(seats) & set(self._group.members.seats)

        if not self._wait(over, seconds):
            log.warning("calls were under way on ranks %s after %g s, and have no answer", seats, seconds)

    def retire(self, seats: Collection[int], seconds: float) -> str:
        """The group goes on without these members, which end; why it does not yet, or nothing.

        One that stays though its lane was drained is started again: its lane takes no call any more.
        """
        with self._group.lock:
            self._generations.turnover.retiring, self._generations.turnover.why_stay = tuple(seats), ""
            self._group.lock.notify_all()

        def gone() -> bool:
            return not set(seats) & set(self._group.members.seats)

        def served() -> bool:
            return self._generations.state == "serving" and gone()

        self._wait(lambda: served() or bool(self._generations.turnover.why_stay), seconds)
        with self._group.lock:
            self._generations.turnover.retiring, self._generations.turnover.leaving = (), frozenset()
            self.draining = frozenset()
            for seat in seats:  # lost before it could leave: nobody comes back for it
                if seat in self._generations.turnover.returning.seats:
                    self._generations.turnover.forget(seat, "it was to leave")
            stay = sorted(set(seats) & set(self._group.members.seats))
            for seat in stay:
                if seat in self._group.seats:
                    process = self._group.seats[seat].process(seat)
                    self._generations.given_up(process, DRAINED)
            if served():
                return ""
            if not stay:
                return f"ranks {sorted(seats)} have left, and the group does not serve yet: {self._why()}"
            late = f"they have not left within {seconds:g} s: {self._why()}"
            return f"ranks {stay} stay: {self._generations.turnover.why_stay or late}"

    def _are_members(self, seats: Collection[int]) -> bool:
        return self._generations.state == "serving" and set(seats) <= set(self._group.members.seats)

    def _wait(self, true: Callable[[], bool], seconds: float) -> bool:
        """Waits until it is true, or the group has ended; whether it is true."""
        with self._group.lock:
            self._group.lock.wait_for(lambda: true() or self._generations.ended, seconds)
            return true()

    def _why(self) -> str:
        return self._generations.reason or f"the group is {self._generations.state}"


def free_seats(members: Members, count: int) -> list[int]:
    """So many reserved seats that a rank can take, lowest first: its lane and its owner's place have the
    seat's number. Raises ValueError where there are fewer.
    """
    taken = {*members.seats, *(m.lane for m in members.present), *(m.owner for m in members.present)}
    room = min(members.max_lanes, members.max_owners)
    free = [seat for seat in range(room) if seat not in taken]
    if len(free) < count:
        ranks = len(members) + count
        raise ValueError(
            f"ranks={ranks}: the group has room for {members.max_lanes} lanes and {members.max_owners} "
            f"owners; start it with members.max_lanes and members.max_owners = {ranks} or more"
        )
    return free[:count]
