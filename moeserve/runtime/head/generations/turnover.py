"""`Turnover`: members that leave a group while it serves, and others that join it, between two steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from moeserve.proto.texts import clipped, quoted
from moeserve.runtime.control.messages import epoch_message
from moeserve.runtime.control.stream import Message
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.generations.returning import Returning, with_ranks
from moeserve.runtime.head.group import Group
from moeserve.runtime.head.reception import RankProcess, Refusal, Seat

log = logging.getLogger(__name__)

TURN_SECONDS = 1.0  # at most, for steps under way when a member is to join between two


class Turned(NamedTuple):
    """Members have joined or left between two steps, and the generation ends."""

    reason: str
    joined: tuple[int, ...]


GiveUp = Callable[[RankProcess], None]
"""Has the launcher end a process."""


class Turnover:
    """Changes the epoch's members and seats processes; generations form of them elsewhere.

    It has no thread, and the caller of any method holds the group's lock. `give_up` ends a process that had a
    part in a generation, `let_go` one that no generation has to do with.
    """

    def __init__(self, group: Group, give_up: GiveUp, let_go: GiveUp) -> None:
        self._group, self._give_up, self._let_go = group, give_up, let_go
        self.serve_on = False  # a lost member's experts are served by others, where these have the slots
        # the epoch without those seats; raises ValueError where the others cannot serve without them
        self.without: Callable[[Epoch, list[int]], Epoch] = lambda epoch, seats: epoch.without(seats)
        self.why_whole: Callable[[], str] = lambda: ""  # why the group cannot go on without a member
        self.returning = Returning()
        self.coming: dict[int, str] = {}  # seats of new members, and why one cannot start, once that is known
        self._refused: dict[int, str] = {}  # seats whose last process could not start, and why
        # seats for which no process has loaded since one could not, and why
        self._unloaded: dict[int, str] = {}
        self.orphans = set[int]()  # of these, those that the head before this one asked for: nobody waits
        # by position of a layer, the seats that cannot read some of its experts
        self.unread: Callable[[], Mapping[int, Collection[int]]] = dict
        self.leaving: frozenset[int] = frozenset()  # of members whose lanes callers find no more
        self.retiring: tuple[int, ...] = ()  # of members that the group goes on without, between two steps
        self.why_stay = ""  # why those that were to go have stayed
        self.running: Callable[[], int] = lambda: 0  # steps that members have not finished
        self.busy: Callable[[], bool] = lambda: False  # nobody joins now: experts move
        self._turning_since: float | None = None
        # the epoch without those that go: of which epoch, without whom
        self._retired: tuple[Epoch, list[int], Epoch] | None = None

    @property
    def turning(self) -> bool:
        """Whether no step begins, since members are about to join or to leave."""
        return self._turning_since is not None

    @property
    def words(self) -> list[str]:
        """Who is away, who is to join, and why they could not last, for those who ask how the group is."""
        coming = sorted(self.coming.keys() & set(self.returning.seats))
        away = [seat for seat in self.returning.seats if seat not in coming]
        said = [f"ranks {away} are away, and others serve their experts"] if away else []
        said += [f"ranks {coming} are to join"] if coming else []
        why = self._unloaded | self._refused
        return said + [why[seat] for seat in sorted(self.returning.seats) if seat in why]

    def recovered(self, first: Epoch, wanted: Collection[int]) -> None:
        """A head that has started again goes on without some of the seats `wanted`. These may return: to what
        they had in `first`, the service's first epoch, or as new ranks.
        """
        away, had = sorted(set(wanted) - set(self._group.members.seats)), set(first.members.seats)
        self.returning.leave(first, [seat for seat in away if seat in had], time.monotonic())
        new = [seat for seat in away if seat not in had]
        self.returning.leave(with_ranks(self._group.epoch, new), new, time.monotonic())
        self.orphans = set(new)
        self.coming |= dict.fromkeys(new, "")

    # -- processes that load before they join ---------------------------------------------------------------

    def take_seat(self, rank: int, seat: Seat) -> None:
        """Has a process load what its seat is to hold, while the group serves without it."""
        if (other := self.returning.connected().get(rank)) is not None and other is not seat:
            self.part_with(rank, f"pid {seat.pid} has taken its place", seat.process(rank))
        self._refused.pop(rank, None)
        log.info("rank %d (pid %d) loads, and then joins", rank, seat.pid)
        self._have_load(rank, seat)

    def _have_load(self, rank: int, seat: Seat) -> None:
        self.returning.sit_down(rank, seat, self._group.epoch, time.monotonic())
        epoch = self.returning.epoch_with(self._group.epoch, [rank])
        self._group.send(seat, {"kind": "load", "generation": 0, "epoch": epoch_message(epoch)})
        self._group.lock.notify_all()

    def heard(self, rank: int, message: Message) -> None:
        """Takes the message of a process that loads. Raises ValueError for one that it may not send."""
        match message["kind"]:
            case "here":
                self.returning.heard(rank, time.monotonic())
            case "loaded":
                self.returning.heard(rank, time.monotonic(), loaded=True)
                self._unloaded.pop(rank, None)
                log.info("rank %d has loaded", rank)
            case "failed":
                self.part_with(rank, str(message["reason"]))
                self._unloaded[rank] = clipped(str(message["reason"]))
            case "store" | "withdraw" | "announce" | "restored" | "done" | "run" | "ordered":
                return  # of a generation that it had a part in
            case other:
                raise ValueError(f"rank {rank} is to load, and says {quoted(other)}")
        self._group.lock.notify_all()

    def refused(self, rank: int, refusal: Refusal) -> None:
        """Notes that a process that was to load cannot start."""
        log.warning("rank %d cannot come back: %s", rank, refusal.reason)
        self._refused[rank] = clipped(refusal.reason)
        if refusal.for_good and rank in self.orphans:
            self.forget(rank, refusal.reason)
        elif refusal.for_good and rank in self.coming:
            self.coming[rank] = refusal.reason
        self._group.lock.notify_all()

    def given_up(self, process: RankProcess, why: str) -> bool:
        """Parts with a process that does not run; False where it is none of those that load."""
        seat = self.returning.connected().get(process.rank)
        if seat is None or seat.process(process.rank) != process:
            return False
        self.part_with(process.rank, why)
        return True

    def end_silent(self, now: float) -> None:
        """Parts with processes that load and say nothing for too long."""
        for rank in self.returning.silent(now):
            limit = self.returning.silent_seconds
            self.part_with(rank, f"it read no layer for cluster.prepare_seconds = {limit:g}")

    def forget(self, rank: int, why: str) -> None:
        """Expects no member at a seat any more, and parts with the process that was to join there."""
        if rank in self.returning.connected():
            self.part_with(rank, why)
        self.returning.forget(rank)
        for seats in (self.coming, self._refused, self._unloaded):
            seats.pop(rank, None)
        self.orphans.discard(rank)

    def part_with(self, rank: int, why: str, heir: RankProcess | None = None) -> None:
        """Parts with a process that was to load: it is told to stop, and the launcher ends it, unless it is
        the one that takes the seat again, `heir`.
        """
        seat = self.returning.connected()[rank]
        self.returning.lost(rank)
        log.warning("rank %d (pid %d), which was to join, is given up: %s", rank, seat.pid, why)
        self._group.send(seat, {"kind": "stop"})
        seat.stream.close()
        if (process := seat.process(rank)) != heir:
            self._let_go(process)

    # -- when a generation ends -----------------------------------------------------------------------------

    def take_leave(self) -> None:
        """Members that are to go are none any more, and end; the others hold what they held."""
        if not self._may_retire():
            return
        going = self._going
        self._group.epoch = self._without_retiring()
        self.retiring, self._retired = (), None
        for rank in going:
            if (seat := self._group.seats.pop(rank, None)) is None:
                continue
            log.info("rank %d (pid %d) leaves the group", rank, seat.pid)
            self._group.send(seat, {"kind": "stop"})
            if self.running():  # it may still write to others' buffers
                self._give_up(seat.process(rank))

    def go_on_without(self, lost: list[int]) -> bool:
        """Leaves lost members out of the epoch, where the others can serve without them; else the group is to
        be whole again, with those that it had left out before. Whether it goes on.
        """
        if not lost or not self.serve_on:
            return False
        before = self._group.epoch
        try:
            self._group.epoch = self.epoch_without(lost)
        except ValueError as error:
            log.warning("the group waits for ranks %s: %s", lost, error)
            self._admit([seat for seat in self.returning.seats if seat not in self.coming])
            return False
        self.returning.leave(before, lost, time.monotonic())
        log.warning("the group goes on without ranks %s, in epoch %d", lost, self._group.epoch.number)
        return True

    def epoch_without(self, seats: list[int]) -> Epoch:
        """The epoch when these members are gone. Raises ValueError where the others cannot serve alone."""
        if why := self.why_whole():
            raise ValueError(why)
        return self.without(self._group.epoch, seats)

    def turned(self) -> None:
        """The generation has ended: whoever was to join or to leave has."""
        self._turning_since = None

    # -- between two steps ----------------------------------------------------------------------------------

    def turn(self, now: float) -> Turned | None:
        """Has members that have loaded join, once no step is under way; those that are to leave do so as the
        generation ends. None while nobody does.
        """
        if self._turning_since is None and self.busy():
            return None
        for rank in self.returning.stale(self._group.epoch):
            log.info("rank %d loads again: the weights were reloaded meanwhile", rank)
            self._have_load(rank, self.returning.connected()[rank])
        ready = self.returning.ready(now)
        if not ready and not self._may_retire():
            self._turning_since = None  # who was to join is lost again: steps go on
            return None
        if self._turning_since is None:
            self._turning_since = now
        if self.running() and now - self._turning_since < TURN_SECONDS:
            return None
        self._admit(ready)
        said = [f"ranks {ready} join"] if ready else []
        said += [f"ranks {list(self.retiring)} leave"] if self.retiring else []
        return Turned("; ".join(said), tuple(ready))

    def _may_retire(self) -> bool:
        """Whether members are to go, and the others can serve without them; where these cannot, none goes."""
        if not self._going:
            return False
        try:
            self._without_retiring()
        except ValueError as error:
            log.warning("ranks %s stay: %s", self.retiring, error)
            self.retiring, self.why_stay = (), str(error)
            self._group.lock.notify_all()
            return False
        return True

    def _without_retiring(self) -> Epoch:
        """The epoch without those that are to go, made once. Raises ValueError as `without` does."""
        now, going = self._group.epoch, self._going
        if self._retired is None or self._retired[0] is not now or self._retired[1] != going:
            self._retired = (now, going, self.epoch_without(going))
        return self._retired[2]

    @property
    def _going(self) -> list[int]:
        """Seats of members that are to go; others of `retiring` have been lost meanwhile."""
        return [seat for seat in self.retiring if seat in self._group.members.seats]

    def _admit(self, seats: list[int]) -> None:
        """Makes members of those that were away; the present generation has to end. Experts that others could
        not read are given up by them, where those hold them now.
        """
        epoch = self.returning.epoch_with(self._group.epoch, seats)
        self._group.epoch = epoch.yielding(self.unread())
        for seat in seats:
            for others in (self.coming, self._refused, self._unloaded):
                others.pop(seat, None)
            self.orphans.discard(seat)
        self.returning.join(seats, self._group.seats.__setitem__, time.monotonic())
