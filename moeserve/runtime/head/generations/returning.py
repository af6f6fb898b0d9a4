"""`Returning`: members that a group goes on without, and their way back: they load first, and then join."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeserve.dispatch.members import Member
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.generations.patience import Backoff
from moeserve.runtime.head.reception import Seat

STEADY_SECONDS = 30.0  # a member that ends within so long of joining may join again later only


@dataclass(eq=False)
class _Away:
    """A member that the group serves without, and the process that is to take its seat again, if any."""

    member: Member
    slots: NDArray[np.int32] | None  # [L, width] what its owner's place held; None without one
    seat: Seat | None = None
    heard: float = 0.0  # when its process last said that it goes on
    loaded: bool = False
    not_before: float = 0.0  # when it may join: later each time that it ended soon after it had joined
    versions: tuple[int, ...] = ()  # of the weights that it was told to load, by layer


def with_ranks(epoch: Epoch, seats: Collection[int]) -> Epoch:
    """`epoch` with new ranks in these seats: lane and owner's place have its number. They get replicas of
    the experts that have fewest. Raises ValueError for seats that cannot be filled.
    """
    for seat in sorted(seats):
        epoch = epoch.joined(Member(seat, lane=seat, owner=seat))
    return epoch


class Returning:
    """Who is away, and who of these may join. It decides, and nothing else; its owner holds a lock.

    silent_seconds: a process that says nothing for so long while it loads is given up.
    """

    def __init__(self, silent_seconds: float = 120.0) -> None:
        self.silent_seconds = silent_seconds
        self._away: dict[int, _Away] = {}
        self._joined: dict[int, float] = {}  # seats that were away -> when they joined
        self._backoffs: defaultdict[int, Backoff] = defaultdict(Backoff)

    @property
    def seats(self) -> list[int]:
        """Those that are away, or load."""
        return sorted(self._away)

    @property
    def members(self) -> list[Member]:
        """Those that are away, or load, as they were."""
        return [self._away[seat].member for seat in self.seats]

    def ready(self, now: float) -> list[int]:
        """Those that have loaded, and may join between two steps."""
        return sorted(seat for seat, away in self._away.items() if away.loaded and away.not_before <= now)

    def connected(self) -> dict[int, Seat]:
        """Those whose process is there, and loads or has loaded."""
        return {number: away.seat for number, away in self._away.items() if away.seat is not None}

    def leave(self, epoch: Epoch, seats: list[int], now: float) -> None:
        """The group goes on without these members of `epoch`; what they held is remembered. One that ends
        soon after it has joined, again and again, is let in later each time: all pause whenever it joins.
        """
        width = epoch.placement.slots_per_owner
        for number in seats:
            member = epoch.members.at(number)
            slots = None
            if member.owner is not None:
                first = member.owner * width
                slots = epoch.placement.slots[:, first : first + width].copy()
            self._away[number] = away = _Away(member, slots)
            if now - self._joined.pop(number, -math.inf) < STEADY_SECONDS:
                away.not_before = now + self._backoffs[number].next()
            else:
                self._backoffs[number].reset()

    def sit_down(self, number: int, seat: Seat, epoch: Epoch, now: float) -> None:
        """A process has come for a seat that is away. It is to load what it had, in `epoch`'s weights."""
        away = self._away[number]
        away.seat, away.heard, away.loaded = seat, now, False
        away.versions = _versions(epoch)

    def stale(self, epoch: Epoch) -> list[int]:
        """Those that have loaded, and other weights than `epoch` has: they are to load again."""
        loaded = (number for number in self.seats if self._away[number].loaded)
        return [number for number in loaded if self._away[number].versions != _versions(epoch)]

    def is_here(self, number: int, seat: Seat) -> bool:
        """Whether that very process waits to join."""
        return number in self._away and self._away[number].seat is seat

    def lost(self, number: int) -> None:
        """Its process has gone again."""
        self._away[number].seat, self._away[number].loaded = None, False

    def forget(self, number: int) -> None:
        """Nobody is to come for this seat."""
        del self._away[number]

    def heard(self, number: int, now: float, *, loaded: bool = False) -> None:
        """Its process goes on, or has loaded."""
        away = self._away[number]
        away.heard, away.loaded = now, away.loaded or loaded

    def silent(self, now: float) -> list[int]:
        """Those that load and have said nothing for too long."""
        return sorted(
            number
            for number, away in self._away.items()
            if away.seat is not None and not away.loaded and now - away.heard > self.silent_seconds
        )

    def due(self) -> float:
        """When the first of those that load has been silent for too long; infinite where none loads."""
        heard = (a.heard for a in self._away.values() if a.seat is not None and not a.loaded)
        return min(heard, default=math.inf) + self.silent_seconds

    def epoch_with(self, epoch: Epoch, numbers: list[int]) -> Epoch:
        """`epoch` once these have joined it, with what their places held before."""
        for number in numbers:
            away = self._away[number]
            epoch = epoch.joined(away.member, slots=away.slots)
        return epoch

    def join(self, numbers: list[int], take: Callable[[int, Seat], None], now: float) -> None:
        """These are members again; `take` gets those whose process is there."""
        for number in numbers:
            away, self._joined[number] = self._away.pop(number), now
            if away.seat is not None:
                take(number, away.seat)


def _versions(epoch: Epoch) -> tuple[int, ...]:
    return tuple(epoch.version(at) for at in range(epoch.placement.layers))
