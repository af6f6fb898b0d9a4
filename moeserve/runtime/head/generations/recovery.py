"""`Recovery`: a head that has started again hears from the members of the one before it what they hold."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from moeserve.runtime.control.messages import held_from
from moeserve.runtime.control.stream import Message
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.generations.generations import DRAINED, Generations
from moeserve.runtime.head.group import Group
from moeserve.runtime.head.reception import Refusal, Seat

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """What the members have told: the epoch that is the group's, the newest generation that any of them has
    heard of, and the members that are there. `silent` are those that never told: what they hold may be newer.
    `drained` are those whose lanes take no call any more: the head before had them leave, or stop.
    """

    epoch: Epoch
    generation: int
    seats: dict[int, Seat]
    silent: dict[int, Seat]
    drained: dict[int, Seat]


class Recovery:
    """Who has come back to a head that started again, and what they hold. It decides, and nothing else: no
    thread, no lock, no clock of its own.

    A change that the dead head had decided may have reached some members and not others: the highest epoch
    that any of them adopted is the group's. Steps need all owners at one epoch, so that no answer was ever
    given under an epoch that all who adopted it have died with.

    first: the epoch that the service starts with, which is the group's where nobody holds any other. now,
    seconds: from when, or from the first that comes later, and for how long members are waited for that have
    not come back; tell: for how many seconds more those that have may be in a step, or read experts, before
    they say what they hold.
    """

    def __init__(self, first: Epoch, now: float, seconds: float, tell: float = 120.0) -> None:
        self._due, self._seconds, self._tell = now + seconds, seconds, tell
        self._first, self._highest = first, first
        self._generation = 0
        self._here: dict[int, Seat] = {}
        self._told = set[int]()  # seats whose process has said what it holds, or never held anything
        self._drained = set[int]()  # those of them whose lanes take no call any more
        self._adopted = False  # whether anybody has adopted any epoch

    def connected(self, number: int, seat: Seat, now: float = -math.inf) -> Seat | None:
        """A member is there; one that was started meanwhile holds nothing. Returns the process whose seat it
        takes, if any.
        """
        if not self._here:
            self._due = max(self._due, now + self._seconds)
        before = self._here.get(number)
        self._here[number] = seat
        self._told.discard(number)
        self._drained.discard(number)
        if not seat.again:
            self._told.add(number)
        return before

    def is_here(self, number: int, seat: Seat) -> bool:
        """Whether that very process waits for the end of the recovery."""
        return self._here.get(number) is seat

    def lost(self, number: int) -> None:
        """The member's stream has ended; what it has told stays true."""
        self._here.pop(number, None)
        self._told.discard(number)

    def holds(self, number: int, generation: int, epoch: Epoch | None, *, drained: bool = False) -> None:
        """A member says what it holds. Raises ValueError for an epoch that is none of this service."""
        if epoch is not None:
            check_of(epoch, self._first)
            if not self._adopted or epoch.number > self._highest.number:
                self._highest, self._adopted = epoch, True
        self._generation = max(self._generation, generation)
        self._told.add(number)
        if drained:
            self.drained(number)

    def drained(self, number: int) -> None:
        """The member's lane takes no call any more, which may be so only since it has told what it holds."""
        self._drained.add(number)

    @property
    def due(self) -> float:
        """When `found` may be another for the time that has passed; infinite while nobody is there."""
        if not self._here:
            return math.inf
        return self._due + (self._tell if self._untold else 0.0)

    @property
    def _untold(self) -> set[int]:
        """Seats of members that are there, and have not said what they hold."""
        return set(self._here) - self._told

    @property
    def here(self) -> dict[int, Seat]:
        """The members that are there, by seat."""
        return dict(self._here)

    @property
    def missing(self) -> list[int]:
        """Seats of members that are not there yet, or have not told yet what they hold."""
        return sorted(set(self._highest.members.seats) - self._told)

    def found(self, now: float) -> Found | None:
        """What was found, once all members of the highest epoch have told, or the time is over; else None.

        Nothing is found while nobody is there: members that come late hold what the first one would not. Nor
        while one that is there has yet to tell: without its word the group might go back to older weights.
        """
        untold = self._untold
        if not self._here or ((self.missing or untold) and now < self.due):
            return None
        log.info(
            "epoch %d is the highest that members hold, and generation %d the newest",
            *(self._highest.number, self._generation),
        )
        drained = {number: seat for number, seat in self._here.items() if number in self._drained - untold}
        here = {number: seat for number, seat in self._here.items() if number not in untold | self._drained}
        silent = {number: self._here[number] for number in untold}
        return Found(self._highest, self._generation, here, silent, drained)

    @property
    def reason(self) -> str:
        """Why the group does not serve meanwhile."""
        away, untold = sorted(set(self.missing) - set(self._here)), sorted(self._untold)
        waits = [f"ranks {away} to come back"] if away else []
        waits += [f"ranks {untold} to say what they hold"] if untold else []
        now = f"waits for {' and '.join(waits)}" if waits else "all ranks are there: the group forms again"
        return f"the head has started again, and {now}"


def check_of(epoch: Epoch, first: Epoch) -> None:
    """Raises ValueError where `epoch` is not of the service that began with `first`."""
    ours, theirs = _shape(first), _shape(epoch)
    if theirs != ours:
        raise ValueError(f"an epoch with {theirs} is not of this service, which has {ours}")


def _shape(epoch: Epoch) -> str:
    placement, members = epoch.placement, epoch.members
    return (
        f"layers={placement.layers}, experts={placement.experts}, "
        f"slots_per_owner={placement.slots_per_owner}, mesh={epoch.mesh.dp}x{epoch.mesh.tp}x{epoch.mesh.ep}, "
        f"max_lanes={members.max_lanes}, max_owners={members.max_owners}"
    )


class Recovering:
    """The recovery of a group: members wait here, and are seated once it is known what they hold. Its caller
    holds the group's lock.
    """

    def __init__(
        self,
        group: Group,
        generations: Generations,
        seconds: float,
        wanted: Collection[int] | None = None,
        greet: Callable[[int, Seat], None] = lambda number, seat: None,
        stops: Callable[[], bool] = lambda: False,
    ) -> None:
        """wanted: seats that were to have a process, as the head before this one said; None: it did not.
        greet: is called with each member that takes its seat. stops: whether the service is about to: then
        members stay whose lanes take no call any more.
        """
        self._group, self._generations, self._greet, self._stops = group, generations, greet, stops
        self._first = group.epoch
        self._wanted = self._first.members.seats if wanted is None else tuple(wanted)
        tell = generations.patience.prepare
        self._recovery: Recovery | None = Recovery(self._first, time.monotonic(), seconds, tell)
        generations.set_state("forming", self._recovery.reason)

    @property
    def under_way(self) -> bool:
        """Whether it is not known yet what the members hold."""
        return self._recovery is not None

    @property
    def here(self) -> dict[int, Seat]:
        """Members that have come back and have no seat yet."""
        return {} if self._recovery is None else self._recovery.here

    @property
    def due(self) -> float:
        """When `advance` is to be called at the latest; infinite once the group is recovered."""
        return math.inf if self._recovery is None else self._recovery.due

    def connected(self, number: int, seat: Seat, refusal: Refusal | None) -> bool:
        """Takes a member that has come; False where members are seated at once, since all is known.

        Raises ValueError for one that cannot start.
        """
        if self._recovery is None:
            return False
        if refusal is not None:
            self._generations.refused(number, refusal)
            raise ValueError(refusal.reason)
        before = self._recovery.connected(number, seat, time.monotonic())
        if before is not None:
            before.stream.close()
            if before.process(number) != seat.process(number):
                self._generations.parted.give_up(before.process(number))
        self._changed()
        return True

    def lost(self, number: int, seat: Seat) -> bool:
        """Forgets a member whose stream ended; False where it does not wait here."""
        if self._recovery is None or not self._recovery.is_here(number, seat):
            return False
        self._recovery.lost(number)
        self._changed()
        return True

    def drained(self, number: int, seat: Seat) -> bool:
        """A member says that its lane is drained, as the head before this one had it; False where it does not
        wait here.
        """
        if self._recovery is None or not self._recovery.is_here(number, seat):
            return False
        if not self._stops():
            self._recovery.drained(number)
        return True

    def holds(self, number: int, seat: Seat, message: Message) -> None:
        """A member says what it holds. One that comes once the group has been recovered may have adopted what
        nobody else did: then the group goes over to it.

        Raises KeyError, TypeError or ValueError where that is malformed, or of another service.
        """
        generation, epoch = held_from(message)
        drained = message.get("drained") is True and not self._stops()
        if self._recovery is not None:
            if self._recovery.is_here(number, seat):
                self._recovery.holds(number, generation, epoch, drained=drained)
                self._changed()
            return
        if drained:
            self._generations.given_up(seat.process(number), DRAINED)
        self._group.newest = max(self._group.newest, generation)
        ours = self._group.epoch
        if epoch is not None and epoch.number > ours.number and epoch.members == ours.members:
            check_of(epoch, self._first)
            self._group.epoch = epoch
            self._generations.abort(f"rank {number} came late, and holds epoch {epoch.number}")

    def advance(self, now: float) -> None:
        """Seats the members once it is known what they hold: a generation forms of them."""
        if self._generations.ended:
            self.end()
        if self._recovery is None or (found := self._recovery.found(now)) is None:
            return
        self._recovery = None
        self._group.epoch = found.epoch
        mute, drained = "it does not say what it holds", DRAINED
        given_up = [(item, mute) for item in found.silent.items()]
        given_up += [(item, drained) for item in found.drained.items()]
        for (number, seat), why in given_up:
            log.warning("rank %d (pid %d) is given up: %s", number, seat.pid, why)
            seat.stream.close()
            self._generations.parted.give_up(seat.process(number))
        self._generations.recovered(self._first, found.generation, self._wanted)
        known = {*self._group.members.seats, *self._generations.turnover.returning.seats}
        for number, seat in found.seats.items():
            if number in known:
                self._generations.seated(number, seat)
                self._greet(number, seat)
                continue
            log.info("rank %d (pid %d) is to leave: it has no seat any more", number, seat.pid)
            self._group.send(seat, {"kind": "stop"})
            seat.stream.close()
        if missing := self._group.missing:
            self._generations.go_on(f"ranks {missing} have not come back since the head has started again")

    def end(self) -> None:
        """Tells those who wait here to stop: the service ends."""
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            for seat in recovery.here.values():
                self._group.send(seat, {"kind": "stop"})
                seat.stream.close()

    def _changed(self) -> None:
        if self._recovery is not None:
            self._generations.set_state("forming", self._recovery.reason)
        self._group.lock.notify_all()
