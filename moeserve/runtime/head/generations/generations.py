"""`Generations`: the state of a group, and what ends each of its generations so that a fresh one forms.

A generation is one process group: prepared (every owner has its experts), joined, serving. `Rendezvous` has
its members come together. When one is lost or cannot go on, the generation aborts, and once all members are
there again a fresh one forms. A member that does not answer is parted with: its process is ended. No
generation forms before it is seen dead, but where nothing that it may still do harms the others
(`Seat.outlives`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection

from moeserve.dispatch.members import Members
from moeserve.proto.texts import clipped
from moeserve.runtime.control.reached import Phase, Reached
from moeserve.runtime.control.stream import Message
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.generations.blame import Blame, Ending
from moeserve.runtime.head.generations.inquiry import Standstill
from moeserve.runtime.head.generations.open_layers import OpenLayers
from moeserve.runtime.head.generations.parted import Parted
from moeserve.runtime.head.generations.patience import Patience
from moeserve.runtime.head.generations.rendezvous import Rendezvous
from moeserve.runtime.head.generations.turnover import Turnover
from moeserve.runtime.head.group import Group
from moeserve.runtime.head.reception import RankProcess, Refusal, Seat

log = logging.getLogger(__name__)

TURN_LOOK_SECONDS = 0.002  # between looks whether steps under way have ended, so that members can join
DRAINED = "its lane was drained, and it is to stay"
"""Why a member is started again whose lane takes no call any more."""

ENDED = ("failed", "stopped")  # states that no other follows, except "stopped" after "failed"


class Generations:
    """The generations of a group, one after another: who has a seat in them, and what becomes of each.

    It has no thread: `next_at` says when `advance` is to be called. The caller of any method holds the
    group's lock.
    """

    def __init__(self, group: Group) -> None:
        self._group, self._seats = group, group.seats
        self.patience = Patience()
        self.state, self._reason = "forming", "waiting for ranks"
        # when the group ceased to serve; None while it serves, and before it ever did
        self._unserved_since: float | None = None
        self._served = False  # whether any generation ever did
        self.aborted = ""  # why the last generation ended, until one serves
        self.broken = False  # whether anything has failed since a generation last served
        self.parted = Parted()
        self._rendezvous = Rendezvous(group, self.parted)
        # the number of the first step that a group's only member orders itself; 0: the head orders all
        self.own_order: Callable[[Members], int] = lambda members: 0
        self._rendezvous.own_order = lambda members: self.own_order(members)
        self._blame = self._no_blame()
        self.hold_seconds = 30.0  # for which lanes keep calls
        # who leaves while the group serves, and who joins
        self.turnover = Turnover(group, self.parted.give_up, lambda process: self.parted.on_given_up(process))
        self.layers = OpenLayers()
        self.turnover.unread = lambda: self.layers.unread
        self._joined = frozenset[int]()  # who has joined between two steps, until that generation serves
        # the step that has not gone on for longest, and since when; None: none is under way
        self.standing_step: Callable[[], tuple[int, float] | None] = lambda: None
        self.on_state: Callable[[], None] = lambda: None
        self.on_abort: Callable[[str], None] = lambda reason: None

    @property
    def ended(self) -> bool:
        """Whether no generation will form any more."""
        return self.state in ENDED

    @property
    def steady(self) -> bool:
        """Whether the generation serves, and steps may begin: no member has said that it cannot go on, and
        none is about to join.
        """
        return self.state == "serving" and not self._blame.failing and not self.turnover.turning

    @property
    def turning(self) -> bool:
        """Whether members join between two steps: soon the group serves again."""
        return self.turnover.turning or (bool(self._joined) and self.state != "serving")

    @property
    def holds(self) -> bool:
        """Whether lanes take calls: the group serves, or they keep them until it serves again."""
        if self._unserved_since is None:
            return self._served and not self.ended
        return not self.ended and time.monotonic() - self._unserved_since < self.hold_seconds

    @property
    def reason(self) -> str:
        """Why the group is in its state; of one that serves, what it does without now."""
        if self.state == "serving":
            return self.degraded
        said = self.parted.said
        return self._reason if said in self._reason or self.ended else f"{self._reason}; {said}"

    @property
    def degraded(self) -> str:
        """What a group that serves does without, in words; empty where it lacks nothing."""
        return "; ".join([*self.turnover.words, *filter(None, [self.layers.reason, self.parted.said])])

    def set_state(self, state: str, reason: str) -> None:
        """Sets the group's state and why it is in it, and tells those who asked to hear."""
        self.state, self._reason = state, reason
        log.info("the group is %s%s", state, f": {clipped(reason)}" if reason else "")
        self.on_state()

    # -- members come and go --------------------------------------------------------------------------------

    def seated(self, rank: int, seat: Seat) -> None:
        """Seats a member that has connected; when all are seated, a generation forms.

        Raises ValueError when the group has ended.
        """
        if self.ended:
            seat.stream.send({"kind": "stop"})
            raise ValueError(f"rank {rank} connected when the group had {self.state}")
        if self.parted.includes(seat.process(rank)):
            seat.stream.send({"kind": "stop"})
            raise ValueError(f"rank {rank} (pid {seat.pid}) comes back, and was given up")
        if rank in self._seats:
            self._part_with(rank, f"pid {seat.pid} has taken its place", seat.process(rank))
            self.abort(f"rank {rank} connected again")
        if rank in self.turnover.returning.seats:
            self.turnover.take_seat(rank, seat)
            return
        self._seats[rank] = seat
        if missing := self._group.missing:
            self.set_state(
                "forming", self.reason if self._group.generation else f"waiting for ranks {missing}"
            )
        else:
            self._rendezvous.begin_soon()

    def recovered(self, first: Epoch, generation: int, wanted: Collection[int]) -> None:
        """A head that has started again goes on with the group's epoch after `generation`, the newest that
        members have heard of. Those of the seats `wanted` that it is without may return: to what they had in
        `first`, the service's first epoch, or as new ranks.
        """
        self._group.generation = generation
        if generation:
            self._served, self._unserved_since = True, time.monotonic()
        self.turnover.recovered(first, wanted)

    def go_on(self, reason: str) -> None:
        """Forms a generation without the members that are missing, where that can be."""
        if self._served and self.turnover.go_on_without(self._group.missing):
            self._rendezvous.begin_at_once()
            self.set_state("forming", reason)

    def lost(self, rank: int, seat: Seat, why: str) -> None:
        """Ends the generation of a member whose stream ended. A failure keeps its own reason."""
        if self.turnover.returning.is_here(rank, seat):
            self.turnover.part_with(rank, why)
            return
        if self._seats.get(rank) is not seat:
            return
        del self._seats[rank]
        if not self.ended:
            self.parted.give_up(seat.process(rank))
            self.abort(f"rank {rank} (pid {seat.pid}) is lost: {why}")

    def given_up(self, process: RankProcess, why: str) -> None:
        """Parts with a member whose process does not run; does nothing where another has its seat by now."""
        if self.turnover.given_up(process, why):
            return
        seat = self._seats.get(process.rank)
        if seat is None or seat.process(process.rank) != process or self.ended:
            return
        self._part_with(process.rank, why)
        self.abort(f"rank {process.rank} (pid {process.pid}) is given up: {why}")

    def refused(self, rank: int, refusal: Refusal) -> None:
        """Notes that a rank cannot start: the launcher tries again. The service ends only where the rank says
        that what it was given is wrong, and the group has never served.
        """
        if self.ended:
            return
        if refusal.for_good and not self._served:
            self.set_state("failed", refusal.reason)
        elif rank in self._group.missing:
            self.set_state(self.state, refusal.reason)
        elif rank in self.turnover.returning.seats:
            self.turnover.refused(rank, refusal)

    # -- what members say -----------------------------------------------------------------------------------

    def heard(self, rank: int, reached: Reached | None = None) -> None:
        """A member answers, and how far it is, or has read one more layer."""
        self._blame.heard(rank, reached)
        stepping = reached is not None and Phase.BEGUN <= reached.phase < Phase.DONE
        self._rendezvous.heard(rank, stepping=stepping)
        self._group.lock.notify_all()

    def prepared(self, rank: int, lacks: Collection[int] = ()) -> None:
        """A member has its experts, but for those of the layers that it `lacks` and reads once it has joined;
        the last one has all join.
        """
        self.layers.lacks(rank, lacks)
        if self._rendezvous.prepared(rank) and self.state == "preparing":
            self.set_state("joining", f"generation {self._group.generation} is joining")
            self._rendezvous.have_join()

    def joined(self, rank: int) -> bool:
        """A member is in the process group; whether with it the generation begins to serve."""
        if not self._rendezvous.joined(rank) or self.state != "joining":
            return False
        self._rendezvous.succeeded()
        self._served, self._unserved_since, self.aborted = True, None, ""
        self.set_state("serving", self.degraded)  # which is said anew whenever somebody asks
        number, epoch = self._group.generation, self._group.epoch.number
        log.info("generation %d serves epoch %d with %d members", number, epoch, len(self._group.members))
        return True

    def asked(self, rank: int, message: Message) -> None:
        """A member asks something of the store in which its process groups meet, as `Rendezvous` has it."""
        self._rendezvous.asked(rank, message)

    def failed(self, rank: int, reason: str, *, for_good: bool = False) -> None:
        """A member cannot go on. It may be the one that waited: the first one's word has all others asked.
        for_good: what it was given is wrong, which ends a service that has never served.
        """
        if for_good and not self._served and not self.ended:
            self.set_state("failed", reason)
        self._blame.failed(rank, reason, time.monotonic())
        self._group.lock.notify_all()

    def stuck(self, seats: list[int], why: str) -> None:
        """Ends the generation of members that have not done what all had to do; some of all are given up."""
        if set(seats) < set(self._group.members.seats):
            for rank in seats:
                if rank in self._seats:
                    self._part_with(rank, f"it {why}")
        self.abort(f"ranks {seats} {why}")

    def abort(self, reason: str, *, said: bool = False, joining: Collection[int] | None = None) -> None:
        """Ends the generation: lanes hold their jobs if any ever served, and a fresh one forms when all
        members are there, or at once without those that are lost.

        `said`: a member says that it cannot go on. If this generation never served, the next one backs off.
        `joining`: nothing has failed; these join it, or members have left.
        """
        log.warning("generation %d aborts: %s", self._group.generation, reason)
        self.broken = joining is None or (self.broken and self.state != "serving")
        self.turnover.take_leave()
        goes_on = self._served and self.turnover.go_on_without(self._group.missing)
        unformed = said and self.state in ("preparing", "joining")
        pause = self._rendezvous.next_pause(settled=goes_on or joining is not None, said=unformed)
        if self.state == "serving":
            self._unserved_since = time.monotonic()
        self.on_abort(reason)
        self.aborted = reason
        self._blame = self._no_blame()
        self.turnover.turned()
        self._joined = frozenset(joining or ())
        self.layers.clear()
        aborted, self._group.generation = self._group.generation, self._group.generation + 1
        gone = {"kind": "abort", "generation": aborted, "reason": reason, "back": self._served}
        self._group.broadcast(gone)
        self.set_state("forming", reason)
        self._rendezvous.end(pause)

    # -- time passes ----------------------------------------------------------------------------------------

    def next_at(self) -> float:
        """When the next bound passes, or the next generation forms; infinite for never."""
        blamed = self._blame.due(self._standstill())
        turning = time.monotonic() + TURN_LOOK_SECONDS if self.turnover.turning else math.inf
        silent = self.turnover.returning.due()
        return min(self._rendezvous.next_at(), blamed, turning, silent, self._give_up_at())

    def advance(self, now: float) -> None:
        """Forms the next generation, ends waits that are over, and the service where it has to end."""
        if self.ended:
            return
        if self._rendezvous.due(now):
            self._form(now)
        if not self._rendezvous.awaits_ends:
            self.parted.report(now, waits=False)
        self._end_waits(now)
        self.turnover.end_silent(now)
        self._turn(now)
        if (ending := self._blame.ending(now, self._standstill())) is not None:
            self._end(ending)
        if self._give_up_at() <= now:
            missing = self._group.missing
            who = f"ranks {missing} are missing; " if missing else ""
            limit = self.patience.give_up
            self.set_state(
                "failed", f"not served for cluster.give_up_seconds = {limit:g}: {who}{self.reason}"
            )

    def look_for_ends(self) -> None:
        """The launcher has said anew which processes there are: a generation that waits for ends may form."""
        self._rendezvous.look_for_ends()

    def _turn(self, now: float) -> None:
        """Has members that have loaded join, and those leave that are to go, between two steps."""
        if self.state != "serving" or self._blame.failing or self.layers.reading:
            return
        if (turned := self.turnover.turn(now)) is not None:
            self.abort(turned.reason, joining=turned.joined)

    def _form(self, now: float) -> None:
        """Begins a fresh generation, now that all members are connected, and those before them have ended or
        can do no harm.
        """
        if self._rendezvous.put_off(now):
            if undead := self.parted.report(now, waits=True):
                self.set_state("forming", undead)
            return
        self._rendezvous.begin(now, self.patience)
        self.set_state("preparing", f"generation {self._group.generation} is loading experts")
        self._rendezvous.have_prepare(after=self._served)

    def _end_waits(self, now: float) -> None:
        """Ends a formation that waits for a member for too long."""
        if self.state == "preparing" and (silent := self._rendezvous.silent(now)):
            named = [f"rank {rank} (pid {self._seats[rank].pid}): {why}" for rank, why in silent.items()]
            for rank, why in silent.items():
                self._part_with(rank, why)
            self.abort("; ".join(named))

    def _standstill(self) -> Standstill | None:
        """What all members do together now, and since when it has not gone on; None for nothing."""
        if self.state == "joining":
            what = f"joining generation {self._group.generation}"
            bound, key = self.patience.join, "cluster.join_seconds"
            if self._joined and self.hold_seconds:  # it served before: calls wait
                bound, key = min((bound, key), (self.hold_seconds, "members.hold_seconds"))
            return Standstill(what, self._rendezvous.began, bound, key)
        if self.state != "serving" or (standing := self.standing_step()) is None:
            return None
        step, since = standing
        return Standstill(f"step {step}", since, self.patience.late, "step.late_seconds")

    def _end(self, ending: Ending) -> None:
        """Parts with those who are to blame, and ends the generation."""
        guilty = dict(ending.guilty)
        if ending.said and self.state != "serving":  # the others served before these had joined
            guilty |= dict.fromkeys(self._joined & ending.failed, ending.reason)
        for rank, why in guilty.items():
            if rank in self._seats:
                self._part_with(rank, why)
        self.abort(ending.reason, said=ending.said)

    def _no_blame(self) -> Blame:
        return Blame(self._group, lambda process: self.parted.has_ended(process, unknown=False))

    def _part_with(self, rank: int, why: str, heir: RankProcess | None = None) -> None:
        """Takes a member's seat: its process is told to stop, and the launcher ends it, unless it is the one
        that takes the seat again, `heir`.
        """
        seat = self._seats.pop(rank)
        log.warning("rank %d (pid %d) is given up: %s", rank, seat.pid, why)
        self._group.send(seat, {"kind": "stop"})
        seat.stream.close()
        if (process := seat.process(rank)) != heir:
            self.parted.give_up(process)
        else:
            self.parted.linger(process)

    def _give_up_at(self) -> float:
        """When the service ends because it has not served for so long."""
        if self._unserved_since is None or not self.patience.give_up:
            return math.inf
        return self._unserved_since + self.patience.give_up
