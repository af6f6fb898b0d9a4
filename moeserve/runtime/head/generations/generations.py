"""`Generations`: how a group comes together, ends, and comes together again.

A generation is one process group: prepared (every owner has its experts), joined, serving. When a member is
lost or cannot go on, it aborts, and once all members are there again a fresh one forms. A member that does
not answer is parted with: its process is ended, and no generation forms before it is seen dead.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Collection

from moeserve.proto.texts import clipped, quoted
from moeserve.runtime.control.messages import epoch_message
from moeserve.runtime.control.reached import Phase, Reached
from moeserve.runtime.control.stream import Message
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.head.generations.inquiry import Inquiry, Standstill
from moeserve.runtime.head.generations.key_store import KeyStore
from moeserve.runtime.head.generations.open_layers import OpenLayers
from moeserve.runtime.head.generations.patience import Backoff, Formation, Patience
from moeserve.runtime.head.generations.returning import Returning, with_ranks
from moeserve.runtime.head.group import Group
from moeserve.runtime.head.reception import RankProcess, Refusal, Seat

log = logging.getLogger(__name__)

SETTLE_SECONDS = 0.25  # after a failure that no lost rank explains: a killed rank's stream ends by then
TURN_SECONDS = 1.0  # at most, for steps under way when a member is to join between two
TURN_LOOK_SECONDS = 0.002  # between looks whether those steps have ended
ENDED = ("failed", "stopped")  # states that no other follows, except "stopped" after "failed"
GONE_LOOK_SECONDS = 0.01  # between looks whether a process that was given up has ended
LOOK_SECONDS = 0.1  # between looks whether members have answered
GONE_REPORT_SECONDS = 5.0  # between words on processes that were killed and do not end
BLAME_SECONDS = 0.2  # after a rank failed an entry: a peer that died is found by then, and is the cause


class Generations:
    """The generations of a group, and the store that the process groups of the present one meet in.

    It has no thread: `next_at` says when `advance` is to be called. The caller of any method holds the
    group's lock.
    """

    def __init__(self, group: Group) -> None:
        self._group, self._seats = group, group.seats
        self.patience = Patience()
        self._formation = Formation((), self.patience, 0.0)
        self.state, self.reason = "forming", "waiting for ranks"
        self._retries = Backoff()  # of generations that members say cannot form; deaths do not count
        # when the group ceased to serve; None while it serves, and before it ever did
        self._unserved_since: float | None = None
        self._served = False  # whether any generation ever did
        self.aborted = ""  # why the last generation ended, until one serves
        self._form_at = math.inf
        # when to abort, unless a lost rank explains it before; why
        self._failing: tuple[float, str] | None = None
        self._unheard = set[int]()  # seats that have not answered since a member failed
        self._given_up = set[RankProcess]()  # of members that were parted with; they may still run
        self._undead_at = math.inf  # when it is said again that those have not ended
        self._store = KeyStore()
        self._name = f"moeserve-{secrets.token_hex(4)}"  # of process groups, beside those of other heads
        self._inquiry: Inquiry | None = None  # what members answer while nothing goes on
        self.hold_seconds = 30.0  # for which lanes keep calls
        self.serve_on = False  # a lost member's experts are served by others, where these have the slots
        # the epoch without those seats; raises ValueError where the others cannot serve without them
        self.without: Callable[[Epoch, list[int]], Epoch] = lambda epoch, seats: epoch.without(seats)
        self.why_whole: Callable[[], str] = lambda: ""  # why the group cannot go on without a member
        self.returning = Returning(self.patience.prepare)
        self.coming: dict[int, str] = {}  # seats of new members, and why one cannot start, once that is known
        self.leaving: frozenset[int] = frozenset()  # of members whose lanes callers find no more
        self.retiring: tuple[int, ...] = ()  # of members that the group goes on without, between two steps
        self.why_stay = ""  # why those that were to go have stayed
        self.layers = OpenLayers()
        self.running: Callable[[], int] = lambda: 0  # steps that members have not finished
        self.busy: Callable[[], bool] = lambda: False  # nobody joins now: experts move
        self._turning_since: float | None = None  # no step begins: a member is to join
        self._joining = False  # the generation that forms is one that members have joined between two steps
        self.on_given_up: Callable[[RankProcess], None] = lambda process: None  # the launcher ends it
        # whether that process has ended, for a launcher to say; None: nobody knows, nor has to be waited for
        self.is_gone: Callable[[RankProcess], bool] | None = None
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
        return self.state == "serving" and self._failing is None and self._turning_since is None

    @property
    def turning(self) -> bool:
        """Whether members join between two steps: soon the group serves again."""
        return self._turning_since is not None or (self._joining and self.state != "serving")

    @property
    def holds(self) -> bool:
        """Whether lanes take calls: the group serves, or they keep them until it serves again."""
        if self._unserved_since is None:
            return self._served and not self.ended
        return not self.ended and time.monotonic() - self._unserved_since < self.hold_seconds

    @property
    def degraded(self) -> str:
        """What a group that serves does without, in words; empty where it lacks nothing."""
        coming = sorted(self.coming.keys() & set(self.returning.seats))
        away = [seat for seat in self.returning.seats if seat not in coming]
        said = [f"ranks {away} are away, and others serve their experts"] if away else []
        said += [f"ranks {coming} are to join"] if coming else []
        return "; ".join([*said, *filter(None, [self.layers.reason])])

    def set_state(self, state: str, reason: str) -> None:
        """Sets the group's state and why it is in it, and tells those who asked to hear."""
        self.state, self.reason = state, reason
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
        if seat.process(rank) in self._given_up and self.is_gone is not None:
            seat.stream.send({"kind": "stop"})
            raise ValueError(f"rank {rank} (pid {seat.pid}) comes back, and was given up")
        if rank in self._seats:
            self._part_with(rank, f"pid {seat.pid} has taken its place", seat.process(rank))
            self.abort(f"rank {rank} connected again")
        if rank in self.returning.seats:
            self._seat_aside(rank, seat)
            return
        self._seats[rank] = seat
        if missing := self._group.missing:
            self.set_state(
                "forming", self.reason if self._group.generation else f"waiting for ranks {missing}"
            )
        else:
            settled = time.monotonic() + (SETTLE_SECONDS if self._group.generation else 0)
            self._form_at = min(self._form_at, settled)
            self._group.lock.notify_all()

    def recovered(self, first: Epoch, generation: int, wanted: Collection[int]) -> None:
        """A head that has started again goes on with the group's epoch after `generation`, the newest that
        members have heard of. Those of the seats `wanted` that it is without may return: to what they had in
        `first`, the service's first epoch, or as new ranks.
        """
        self._group.generation = generation
        if generation:
            self._served, self._unserved_since = True, time.monotonic()
        away, had = sorted(set(wanted) - set(self._group.members.seats)), set(first.members.seats)
        self.returning.leave(first, [seat for seat in away if seat in had], time.monotonic())
        new = [seat for seat in away if seat not in had]
        self.returning.leave(with_ranks(self._group.epoch, new), new, time.monotonic())

    def go_on(self, reason: str) -> None:
        """Forms a generation without the members that are missing, where that can be."""
        if self._go_on(self._group.missing):
            self._form_at = time.monotonic()
            self.set_state("forming", reason)

    def _seat_aside(self, rank: int, seat: Seat) -> None:
        """Has a member load what it held, while the group serves without it."""
        if (other := self.returning.connected().get(rank)) is not None and other is not seat:
            self._part_with_returning(rank, f"pid {seat.pid} has taken its place", seat.process(rank))
        log.info("rank %d (pid %d) loads, and then joins", rank, seat.pid)
        self._have_load(rank, seat)

    def _have_load(self, rank: int, seat: Seat) -> None:
        self.returning.sit_down(rank, seat, self._group.epoch, time.monotonic())
        epoch = self.returning.epoch_with(self._group.epoch, [rank])
        self._group.send(seat, {"kind": "load", "generation": 0, "epoch": epoch_message(epoch)})
        self._group.lock.notify_all()

    def returning_says(self, rank: int, message: Message) -> None:
        """Takes the message of a member that loads. Raises ValueError for one that it may not send."""
        match message["kind"]:
            case "here":
                self.returning.heard(rank, time.monotonic())
            case "loaded":
                self.returning.heard(rank, time.monotonic(), loaded=True)
                log.info("rank %d has loaded", rank)
            case "failed":
                self._part_with_returning(rank, str(message["reason"]))
            case "store" | "withdraw" | "announce" | "restored":
                return  # of a generation that it had a part in
            case other:
                raise ValueError(f"rank {rank} is to load, and says {quoted(other)}")
        self._group.lock.notify_all()

    def lost(self, rank: int, seat: Seat, why: str) -> None:
        """Ends the generation of a member whose stream ended. A failure keeps its own reason."""
        if self.returning.is_here(rank, seat):
            self._part_with_returning(rank, why)
            return
        if self._seats.get(rank) is not seat:
            return
        del self._seats[rank]
        if not self.ended:
            self._give_up(seat.process(rank))
            self.abort(f"rank {rank} (pid {seat.pid}) is lost: {why}")

    def given_up(self, process: RankProcess, why: str) -> None:
        """Parts with a member whose process does not run; does nothing where another has its seat by now."""
        aside = self.returning.connected().get(process.rank)
        if aside is not None and aside.process(process.rank) == process:
            self._part_with_returning(process.rank, why)
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
        elif rank in self.returning.seats:
            log.warning("rank %d cannot come back: %s", rank, refusal.reason)
            if refusal.for_good and rank in self.coming:
                self.coming[rank] = refusal.reason
                self._group.lock.notify_all()

    def forget(self, rank: int, why: str) -> None:
        """Expects no member at a seat any more, and parts with the process that was to join there."""
        if rank in self.returning.connected():
            self._part_with_returning(rank, why)
        self.returning.forget(rank)

    # -- what members say -----------------------------------------------------------------------------------

    def heard(self, rank: int, reached: Reached | None = None) -> None:
        """A member answers, and how far it is, or has read one more layer."""
        self._unheard.discard(rank)
        if self._inquiry is not None and reached is not None:
            self._inquiry.answered(rank, reached)
        stepping = reached is not None and Phase.BEGUN <= reached.phase < Phase.DONE
        self._formation.heard(rank, time.monotonic(), stepping=stepping)
        self._group.lock.notify_all()

    def prepared(self, rank: int, lacks: Collection[int] = ()) -> None:
        """A member has its experts, but for those of the layers that it `lacks` and reads once it has joined;
        the last one has all join.
        """
        self.layers.lacks(rank, lacks)
        self._formation.has_prepared(rank, time.monotonic())
        if self.state == "preparing" and self._formation.prepared:
            self._join()

    def joined(self, rank: int) -> bool:
        """A member is in the process group; whether with it the generation begins to serve."""
        self._formation.has_joined(rank)
        if self.state != "joining" or not self._formation.joined:
            return False
        self._retries.reset()
        self._served, self._unserved_since, self.aborted = True, None, ""
        self.set_state("serving", self.degraded)
        number, epoch = self._group.generation, self._group.epoch.number
        log.info("generation %d serves epoch %d with %d members", number, epoch, len(self._group.members))
        return True

    def asked(self, rank: int, message: Message) -> None:
        """A member asks something of the store in which its process groups meet.

        Raises KeyError, TypeError or ValueError where that is malformed.
        """
        common = {"kind": "stored", "generation": self._group.generation}
        for number, answer in self._store.answers(rank, message):
            if number in self._seats:
                self._group.send(self._seats[number], common | answer)

    def failed(self, rank: int, reason: str) -> None:
        """A member cannot go on. It may be the one that waited: the first one's word has all others asked."""
        if self._failing is None:
            self._failing = (time.monotonic() + BLAME_SECONDS, reason)
            self._unheard = set(self._seats)
            if self._inquiry is not None:
                self._inquiry.asked(time.monotonic())
            self._ask()
        self._unheard.discard(rank)
        if self._inquiry is not None:
            self._inquiry.failed(rank)
        self._group.lock.notify_all()

    def stuck(self, seats: list[int], why: str) -> None:
        """Ends the generation of members that have not done what all had to do; some of all are given up."""
        if set(seats) < set(self._group.members.seats):
            for rank in seats:
                if rank in self._seats:
                    self._part_with(rank, f"it {why}")
        self.abort(f"ranks {seats} {why}")

    def abort(self, reason: str, *, said: bool = False, joining: bool = False) -> None:
        """Ends the generation: lanes hold their jobs if any ever served, and a fresh one forms when all
        members are there, or at once without those that are lost.

        `said`: a member says that it cannot go on. If this generation never served, the next one backs off.
        `joining`: nothing has failed.
        """
        log.warning("generation %d aborts: %s", self._group.generation, reason)
        self._take_leave()
        pause = 0.0 if self._go_on(self._group.missing) or joining else SETTLE_SECONDS
        if said and self.state in ("preparing", "joining"):
            pause = max(pause, self._retries.next())
            log.warning("the next generation is tried in %.1f s", pause)
        if self.state == "serving":
            self._unserved_since = time.monotonic()
        self.on_abort(reason)
        self.aborted = reason
        self._failing, self._inquiry, self._store, self._turning_since = None, None, KeyStore(), None
        self._joining = joining
        self.layers.clear()
        aborted, self._group.generation = self._group.generation, self._group.generation + 1
        gone = {"kind": "abort", "generation": aborted, "reason": reason, "back": self._served}
        self._group.broadcast(gone)
        self.set_state("forming", reason)
        self._form_at = math.inf if self._group.missing else time.monotonic() + pause
        self._group.lock.notify_all()

    def _take_leave(self) -> None:
        """Members that are to go are none any more, and end; the others hold what they held."""
        going = [seat for seat in self.retiring if seat in self._group.members.seats]
        if not going or not self._may_retire():
            return
        self._group.epoch = self.without(self._group.epoch, going)
        self.retiring = ()
        for rank in going:
            if (seat := self._seats.pop(rank, None)) is None:
                continue
            log.info("rank %d (pid %d) leaves the group", rank, seat.pid)
            self._group.send(seat, {"kind": "stop"})
            if self.running():  # it may still write to others' buffers
                self._give_up(seat.process(rank))

    def _may_retire(self) -> bool:
        """Whether members are to go, and the others can serve without them; where these cannot, none goes."""
        if not self.retiring:
            return False
        try:
            self.without(self._group.epoch, list(self.retiring))
        except ValueError as error:
            log.warning("ranks %s stay: %s", self.retiring, error)
            self.retiring, self.why_stay = (), str(error)
            self._group.lock.notify_all()
            return False
        return True

    def _go_on(self, lost: list[int]) -> bool:
        """Leaves lost members out of the epoch, where the others can serve without them; else the group is to
        be whole again, with those that it had left out before. Whether it goes on.
        """
        if not lost or not self._served or not self.serve_on:
            return False
        before = self._group.epoch
        try:
            if why := self.why_whole():
                raise ValueError(why)
            self._group.epoch = self.without(before, lost)
        except ValueError as error:
            log.warning("the group waits for ranks %s: %s", lost, error)
            self._admit([seat for seat in self.returning.seats if seat not in self.coming])
            return False
        self.returning.leave(before, lost, time.monotonic())
        log.warning("the group goes on without ranks %s, in epoch %d", lost, self._group.epoch.number)
        return True

    def _admit(self, seats: list[int]) -> None:
        """Makes members of those that were away; the present generation has to end."""
        self._group.epoch = self.returning.epoch_with(self._group.epoch, seats)
        self.returning.join(seats, self._seats.__setitem__, time.monotonic())

    def _turn(self, now: float) -> None:
        """Has members that have loaded join, and those leave that are to go, between two steps."""
        if self.state != "serving" or self._failing is not None or self.layers.closed:
            return
        if self._turning_since is None and self.busy():
            return
        for rank in self.returning.stale(self._group.epoch):
            log.info("rank %d loads again: the weights were reloaded meanwhile", rank)
            self._have_load(rank, self.returning.connected()[rank])
        ready = self.returning.ready(now)
        if not ready and not self._may_retire():
            self._turning_since = None  # who was to join is lost again: steps go on
            return
        if self._turning_since is None:
            self._turning_since = now
        if self.running() and now - self._turning_since < TURN_SECONDS:
            return
        self._admit(ready)
        said = [f"ranks {ready} join"] if ready else []
        said += [f"ranks {list(self.retiring)} leave"] if self.retiring else []
        self.abort("; ".join(said), joining=True)

    # -- time passes ----------------------------------------------------------------------------------------

    def next_at(self) -> float:
        """When the next bound passes, or the next generation forms; infinite for never."""
        forming = self._formation.due() if self.state in ("preparing", "joining") else math.inf
        blamed = math.inf if self._failing is None else self._failing[0]
        if (standstill := self._standstill()) is None:
            asking = math.inf
        else:
            asking = (self._inquiry or Inquiry(standstill, ())).due()
        turning = time.monotonic() + TURN_LOOK_SECONDS if self._turning_since is not None else math.inf
        silent = self.returning.due()
        return min(self._form_at, forming, blamed, asking, turning, silent, self._give_up_at())

    def advance(self, now: float) -> None:
        """Forms the next generation, ends waits that are over, and the service where it has to end."""
        if self.ended:
            return
        if self._form_at <= now and not self._group.missing:
            self._form(now)
        self._end_waits(now)
        self._turn(now)
        self._inquire(now)
        if self._failing is not None and self._failing[0] <= now:
            self._end_failed(now, self._failing[1])
        if self._give_up_at() <= now:
            missing = self._group.missing
            who = f"ranks {missing} are missing; " if missing else ""
            limit = self.patience.give_up
            self.set_state(
                "failed", f"not served for cluster.give_up_seconds = {limit:g}: {who}{self.reason}"
            )

    def _form(self, now: float) -> None:
        """Begins a fresh generation, now that all members are connected and those before them have ended."""
        self._given_up = {one for one in self._given_up if not self._has_ended(one, unknown=True)}
        if self._given_up:
            self._form_at = now + GONE_LOOK_SECONDS
            self._report_undead(now)
            return
        self._undead_at = math.inf
        self._form_at = math.inf
        self._group.generation += 1
        self._formation = Formation(self._group.members.seats, self.patience, now)
        number, epoch = self._group.generation, epoch_message(self._group.epoch)
        self.set_state("preparing", f"generation {number} is loading experts")
        prepare = {"kind": "prepare", "generation": number, "epoch": epoch, "after": self._served}
        self._group.broadcast(prepare)

    def _report_undead(self, now: float) -> None:
        """Says whom the next generation waits for; again and again where one that was killed does not end."""
        processes = sorted(one.pid for one in self._given_up)
        text = f"no generation forms before processes {processes}, given up, have ended"
        if math.isinf(self._undead_at):
            self._undead_at = now + GONE_REPORT_SECONDS
            log.info("%s", text)
        elif self._undead_at <= now:
            self._undead_at = now + GONE_REPORT_SECONDS
            log.error("%s", text)
            self.set_state("forming", text)

    def _join(self) -> None:
        """Has the members form a process group; each is told its position, which is its rank there."""
        self.set_state("joining", f"generation {self._group.generation} is joining")
        members = self._group.members
        entry = {
            "kind": "join",
            "generation": self._group.generation,
            "epoch": self._group.epoch.number,
            "group": f"{self._name}-{self._group.generation}",
            "size": len(members),
        }
        for number, seat in list(self._seats.items()):
            self._group.send(seat, entry | {"position": members.position(number)})

    def _end_waits(self, now: float) -> None:
        """Ends a formation that waits for a member for too long."""
        if self.state == "preparing" and (silent := self._formation.silent(now)):
            named = [f"rank {rank} (pid {self._seats[rank].pid}): {why}" for rank, why in silent.items()]
            for rank, why in silent.items():
                self._part_with(rank, why)
            self.abort("; ".join(named))
        for rank in self.returning.silent(now):
            limit = self.patience.prepare
            self._part_with_returning(rank, f"it read no layer for cluster.prepare_seconds = {limit:g}")

    def _standstill(self) -> Standstill | None:
        """What all members do together now, and since when it has not gone on; None for nothing."""
        if self.state == "joining":
            what = f"joining generation {self._group.generation}"
            return Standstill(what, self._formation.began, self.patience.join, "cluster.join_seconds")
        if self.state != "serving" or (standing := self.standing_step()) is None:
            return None
        step, since = standing
        return Standstill(f"step {step}", since, self.patience.late, "step.late_seconds")

    def _inquire(self, now: float) -> None:
        """Asks members while nothing goes on, and ends the generation where that has lasted for too long."""
        standstill = self._standstill()
        if standstill is None or (self._inquiry is not None and self._inquiry.about != standstill):
            self._inquiry = None
        if standstill is None:
            return
        inquiry = self._inquiry or Inquiry(standstill, self._group.members.seats)
        if inquiry.due() > now:
            return
        if inquiry.complete and inquiry.went_on:
            inquiry.again(now)
            return
        if inquiry.complete:
            self._end_standstill(inquiry, "" if self._failing is None else self._failing[1])
            return
        inquiry.asked(now)
        self._inquiry = inquiry
        self._ask()

    def _end_standstill(self, inquiry: Inquiry, said: str = "") -> None:
        """Parts with those who hold up all others, and ends the generation; `said`: what those others say."""
        verdict = inquiry.verdict()
        for rank, why in verdict.guilty.items():
            if rank in self._seats:
                self._part_with(rank, why)
        self.abort("; ".join(filter(None, (verdict.reason, said))))

    def _ask(self) -> None:
        """Has members say that they run, and how far they are."""
        self._group.broadcast({"kind": "ask", "generation": self._group.generation})

    def _end_failed(self, now: float, reason: str) -> None:
        """Ends the generation of a member that cannot go on. Where nothing has gone on for long it had waited
        for another, and that one is to blame. Those who have ended, or do not even answer, are named first.
        """
        inquiry = self._inquiry
        if inquiry is not None and inquiry.complete and not inquiry.went_on:
            if inquiry.due() > now:
                self._failing = now + LOOK_SECONDS, reason  # who is slow to answer may be the one
                return
            self._end_standstill(inquiry, reason)
            return
        named = {rank: f"rank {rank} (pid {seat.pid})" for rank, seat in sorted(self._seats.items())}
        processes = {rank: seat.process(rank) for rank, seat in self._seats.items()}
        ended = [who for rank, who in named.items() if self._has_ended(processes[rank], unknown=False)]
        silent = [who for rank, who in named.items() if rank in self._unheard and who not in ended]
        said = [f"{', '.join(ended)} has ended"] if ended else []
        said += [f"no answer from {', '.join(silent)}"] if silent else []
        self.abort("; ".join([*said, reason]), said=True)

    def _part_with(self, rank: int, why: str, heir: RankProcess | None = None) -> None:
        """Takes a member's seat: its process is told to stop, and the launcher ends it, unless it is the one
        that takes the seat again, `heir`.
        """
        seat = self._seats.pop(rank)
        log.warning("rank %d (pid %d) is given up: %s", rank, seat.pid, why)
        self._group.send(seat, {"kind": "stop"})
        seat.stream.close()
        if (process := seat.process(rank)) != heir:
            self._give_up(process)

    def _part_with_returning(self, rank: int, why: str, heir: RankProcess | None = None) -> None:
        """Parts with a process that was to load; as `_part_with`, but the group serves on."""
        seat = self.returning.connected()[rank]
        self.returning.lost(rank)
        log.warning("rank %d (pid %d), which was to join, is given up: %s", rank, seat.pid, why)
        self._group.send(seat, {"kind": "stop"})
        seat.stream.close()
        if (process := seat.process(rank)) != heir:
            self.on_given_up(process)

    def _give_up(self, process: RankProcess) -> None:
        """Has the launcher end a process; no generation forms before it is seen dead."""
        self._given_up.add(process)
        self.on_given_up(process)

    def _has_ended(self, process: RankProcess, *, unknown: bool) -> bool:
        """Whether a process has ended; `unknown` where there is no launcher to ask."""
        return unknown if self.is_gone is None else self.is_gone(process)

    def _give_up_at(self) -> float:
        """When the service ends because it has not served for so long."""
        if self._unserved_since is None or not self.patience.give_up:
            return math.inf
        return self._unserved_since + self.patience.give_up
