"""`Coordinator`: forms the group, orders its steps, and changes its epoch. It never sees a tensor.

Members connect one stream each, and are known by their seats. `Generations` has how they come together, and
come together again. A step is sent to the members that take part in it, and waits for nobody else.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from moeserve.dispatch.members import Member
from moeserve.experts.load import Load
from moeserve.runtime.control.shadowed import peers_message, shadowed_from
from moeserve.runtime.control.stream import Message
from moeserve.runtime.epoch import Change, Epoch
from moeserve.runtime.head.draining import Draining
from moeserve.runtime.head.generations.generations import DRAINED, Generations
from moeserve.runtime.head.generations.recovery import Recovering
from moeserve.runtime.head.generations.resizing import Resizing
from moeserve.runtime.head.group import Group
from moeserve.runtime.head.group_view import GroupView
from moeserve.runtime.head.lone_member import LoneMember
from moeserve.runtime.head.member_messages import MemberMessages
from moeserve.runtime.head.placing.pending_change import Outcome
from moeserve.runtime.head.placing.two_phase_commit import TwoPhaseCommit
from moeserve.runtime.head.reception import RankProcess, Reception, Refusal, Seat
from moeserve.runtime.head.stopping import STOPPING, Stopping
from moeserve.runtime.head.told import Told
from moeserve.runtime.keys.keys import Keys
from moeserve.runtime.ordering.sequencer import StepPace
from moeserve.runtime.ordering.step_order import StepOrder

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25  # at most between looks whether a step stands still: nobody is woken when one begins


TURN_LOOK_SECONDS = 0.05  # between looks whether members have joined, and read what they lack


@dataclass(frozen=True)
class Progress:
    """The state of the group, for status and health."""

    state: str  # forming, preparing, joining, serving, failed, stopped
    reason: str
    generation: int
    steps: int
    jobs: int
    queued: int
    in_flight: int
    holds: bool = False  # lanes keep their jobs, and take more, until the group serves again
    broken: bool = False  # the group formed anew because something failed, not for members who come or leave
    aborted: str = ""  # why the last generation ended, until one serves


class Coordinator:
    """Threads: its reception's, one a member, and one that keeps the pace. All state is under one lock.

    `layers` are the decoder indices of the placement's layers.
    """

    def __init__(
        self, epoch: Epoch, layers: tuple[int, ...], pace: StepPace, at: str | socket.socket, token: str
    ) -> None:
        """at: the host, or the socket, where members' streams are accepted, as `Reception` has it."""
        self._group, room = Group(epoch), epoch.members
        self._lock, self._seats = self._group.lock, self._group.seats
        self._changes = TwoPhaseCommit(self._group, layers)
        self.generations = Generations(self._group)
        self._steps = StepOrder(Told(self._group), layers, pace, lambda: self.generations.steady)
        self._lone = LoneMember(self._group, layers)
        self.generations.on_state, self.generations.on_abort = self._state_changed, self._aborted
        steps, lone = self._steps.in_flight, self._lone
        self.generations.standing_step = lambda: steps.standing or lone.standing
        self.generations.turnover.running = lambda: steps.running + lone.under_way
        self.generations.own_order = lambda members: lone.joins(members, steps.next_number)
        self._messages = MemberMessages(
            self._group, layers, self.generations, self._steps, self._changes, self._lone
        )
        self._messages.on_serving = self._tell_peers
        self._messages.on_restored = lambda: self.on_change(self._progress())
        self.view = GroupView(self._group, self.generations.turnover.returning)
        ready = self.view.ready
        self.generations.turnover.without, self._changes.on_epoch = ready.without, ready.renew
        self.keeps_shadows = False  # members are told where they get them from
        self._reception = Reception(at, room.max_lanes + room.max_owners, token, self)
        self.address = self._reception.address
        self._recovering: Recovering | None = None  # of a head that has started again
        self._draining = Draining(self._group)
        self.stopping = Stopping(self._group, self.generations, self._draining, lambda: self._recovers)
        self.resizing = Resizing(self._group, self.generations, self._draining.drained)
        self._log_levels: dict[str, str] = {}  # that every member sets, by logger
        self.on_change: Callable[[Progress], None] = lambda progress: None

    @property
    def generation(self) -> int:
        """The newest generation's number; takes no lock."""
        return self._group.generation

    @property
    def epoch(self) -> Epoch:
        """The epoch that is served, or forms."""
        return self._group.epoch

    def observe_steps(self, observe: Callable[[int, float], None]) -> None:
        """Has `observe` told the layer and the seconds of each step of the whole group."""
        self._steps.observe = self._lone.observe = observe

    def secure(self, keys: Keys) -> None:
        """Has members' streams encrypted as `keys` says; called before `start`."""
        self._reception.keys = keys

    def share_rings(self, nbytes: int, spin: float) -> None:
        """Has members of this host send over rings of so many bytes each way, 0: over TCP as others; called
        before `start`. spin: seconds, as `RingEnd` has it.
        """
        self._reception.ring_bytes, self._reception.ring_spin = nbytes, spin

    @property
    def wanted_seats(self) -> frozenset[int] | None:
        """The seats that are to have a process; None while a head that starts again hears who is there."""
        with self._lock:
            return None if self._recovers else self.resizing.wanted

    @property
    def _recovers(self) -> bool:
        """Whether a head that has started again has yet to hear who is there."""
        return self._recovering is not None and self._recovering.under_way

    def no_room(self, rank: int, why: str) -> None:
        """The launcher cannot start a rank that is to join."""
        with self._lock:
            if rank in self.generations.turnover.coming:
                self.generations.refused(rank, Refusal(why, for_good=True))

    def recover(self, seconds: float, wanted: Collection[int] | None = None) -> None:
        """Has members of the head before this one come back with what they hold, and waits so long for them;
        called before `start`. wanted: the seats that were to have a process; None: those of the first epoch.
        """
        with self._lock:
            self._recovering = Recovering(
                self._group,
                self.generations,
                seconds,
                wanted,
                self._greet,
                lambda: bool(self.stopping.reason),
            )

    def start(self) -> None:
        """Begins to accept members, and to order their steps."""
        patience = self.generations.patience
        self.generations.turnover.returning.silent_seconds = patience.prepare
        self._reception.send_seconds, self._changes.adopt_seconds = patience.send, patience.adopt
        self._reception.reach_seconds = patience.reach
        self._reception.hello_seconds, self._changes.on_stuck = patience.hello, self.generations.stuck
        self._reception.start()
        self.view.ready.start()
        threading.Thread(target=self._keep_pace, name="keep_pace", daemon=True).start()

    def stop(self, reason: str = STOPPING) -> None:
        """Ends the group: members are told to stop."""
        with self._lock:
            self._changes.abandon(reason)
            if self._recovering is not None:
                self._recovering.end()
            self.generations.set_state("stopped", reason)
            for seat in [*self._seats.values(), *self.generations.turnover.returning.connected().values()]:
                self._group.send(seat, {"kind": "stop"})
                seat.stream.close()
            self._seats.clear()
            self._lock.notify_all()
        self.view.ready.close()
        self._reception.close()

    def fail(self, reason: str) -> None:
        """Ends the group as failed: a part of the service that it cannot do without has ended."""
        with self._lock:
            if not self.generations.ended:
                self.generations.set_state("failed", reason)

    def set_log_levels(self, levels: Mapping[str, str]) -> None:
        """Has every member, also those that connect later, set its loggers' levels."""
        with self._lock:
            self._log_levels = dict(levels)
            self._group.broadcast({"kind": "log_levels", "levels": self._log_levels})

    def wait_serving(self, timeout: float) -> None:
        """Returns once the group serves. Raises TimeoutError or RuntimeError, with the reason it does not."""
        with self._lock:
            group = self.generations
            self._lock.wait_for(lambda: group.state == "serving" or group.ended, timeout)
            if group.state == "serving":
                return
            if group.ended:
                raise RuntimeError(group.reason)
            why = group.reason
            if group.aborted and group.aborted != group.reason:
                why += f"; before: {group.aborted}"
            raise TimeoutError(f"the group did not serve within {timeout:.0f} s: {why}")

    def wait_turned(self, timeout: float) -> None:
        """Returns once no member joins between two steps, and none still reads experts of a layer, so that
        experts can move; at the latest after `timeout` seconds.
        """
        group, until = self.generations, time.monotonic() + timeout
        with self._lock:
            while (group.turning or group.layers.closed) and (left := until - time.monotonic()) > 0:
                self._lock.wait(min(left, TURN_LOOK_SECONDS))

    def progress(self) -> Progress:
        """The group's state, the reason for it, and its counts."""
        with self._lock:
            return self._progress()

    def seats(self) -> dict[int, Seat]:
        """The members that are connected now, by seat; those that load before they join; and those that have
        come back to a head that has yet to hear from all what they hold.
        """
        with self._lock:
            back = {} if self._recovering is None else self._recovering.here
        return back or self.view.seats()

    def load(self) -> Load:
        """Tokens by served layer and logical expert, as far as ranks have reported."""
        return self.view.load()

    def change(self, change: Change, timeout: float) -> Outcome:
        """Has every member prepare `change` while steps run, and commits it when all have; blocks until then.

        Abandoned, with the reason, when a member cannot prepare it, copies of one expert differ, the group
        aborts or `timeout` seconds pass; everything is then as it was. One change at a time.
        """
        with self._lock:
            if self.generations.state != "serving" or self.generations.layers.closed:
                return Outcome(f"the group is {self.generations.state}: {self.generations.reason}")
            return self._changes.run(change, timeout)

    # -- members come and go --------------------------------------------------------------------------------

    def rank_connected(self, rank: int, seat: Seat, refusal: Refusal | None) -> None:
        """Seats a member; when all are seated, a generation forms.

        ValueError: it cannot start, comes too late, or the seat is a reserved one.
        """
        with self._lock:
            if self._recovering is not None and self._recovering.connected(rank, seat, refusal):
                return
            away = rank in self.generations.turnover.returning.seats
            if not away and rank not in self._group.members.seats:
                taken = list(self._group.members.seats)
                raise ValueError(f"seat {rank} is vacant: the members of this group have seats {taken}")
            if refusal is not None:
                self.generations.refused(rank, refusal)
                raise ValueError(refusal.reason)
            self.generations.seated(rank, seat)
            self._greet(rank, seat)

    @property
    def away(self) -> list[Member]:
        """Members of the group that are away, or on their way to it, while others serve."""
        with self._lock:
            return self.generations.turnover.returning.members

    def _greet(self, rank: int, seat: Seat) -> None:
        """Tells a process that has taken a seat what all members were told before it came. One that was here
        before may have levels that the head before this one set.
        """
        self._draining.greet(rank, seat)
        if self._log_levels or seat.again:
            self._group.send(seat, {"kind": "log_levels", "levels": self._log_levels})

    def processes_told(self) -> None:
        """The launcher has said anew which processes there are."""
        with self._lock:
            self.generations.look_for_ends()

    def rank_lost(self, rank: int, seat: Seat, why: str) -> None:
        """Ends the generation of a member whose stream ended. A failure keeps its own reason."""
        with self._lock:
            if self._recovering is None or not self._recovering.lost(rank, seat):
                self.generations.lost(rank, seat, why)

    def given_up(self, process: RankProcess, why: str) -> None:
        """Ends the generation of a member whose process does not run, as its launcher has seen."""
        with self._lock:
            self.generations.given_up(process, why)

    def message_received(self, rank: int, seat: Seat, message: Message) -> None:
        """Takes what a member says, whatever the group does; what it says of a generation is heard there."""
        if message["kind"] == "report":
            self.view.reported(seat, message)
            return
        if message["kind"] == "shadowed":
            seat.shadowed = shadowed_from(message)
            return
        with self._lock:
            if message["kind"] == "held":
                if self._recovering is not None:
                    self._recovering.holds(rank, seat, message)
                return
            if message["kind"] == "drained":  # also where the group has formed again since
                self._drained(rank, seat)
                return
            if self.generations.turnover.returning.is_here(rank, seat):
                self.generations.turnover.heard(rank, message)
                return
            self._messages.take(rank, seat, message)

    def _drained(self, rank: int, seat: Seat) -> None:
        """The calls on a member's lane have ended. Where it was the head before this one that told it so, its
        lane takes no call any more though it is to stay: it is started again.
        """
        if self._recovering is not None and self._recovering.drained(rank, seat):
            return
        self._draining.ended(rank)
        if not (self.stopping.reason or self._draining.begun or rank in self.resizing.draining):
            self.generations.given_up(seat.process(rank), DRAINED)

    def _keep_pace(self) -> None:
        """Runs the pace's thread; the group fails, with the reason, when it cannot go on."""
        try:
            self._start_what_is_due()
        except Exception as error:
            log.exception("the coordinator's thread keep_pace ends")
            reason = f"the coordinator cannot go on: {type(error).__name__}: {error}"
            self.fail(reason)

    def _start_what_is_due(self) -> None:
        """Starts what has to wait: steps that gather company, and the next generation."""
        with self._lock:
            while True:
                if self._recovering is not None:
                    self._recovering.advance(time.monotonic())
                self.generations.advance(time.monotonic())
                if self.generations.ended:
                    return
                if self.generations.state == "serving":
                    self._lone.keep_steady(steady=self.generations.steady)
                due = self._steps.begin()
                back = math.inf if self._recovering is None else self._recovering.due
                until = min(math.inf if due is None else due, self.generations.next_at(), back)
                self._steps.sleeps_until = until
                self._lock.wait(min(LOOK_SECONDS, max(0.0, until - time.monotonic())))

    # -- what generations tell ------------------------------------------------------------------------------

    def _tell_peers(self) -> None:
        """Tells members from whom they copy what they keep in host memory."""
        if self.keeps_shadows:
            addresses = {owner: address for owner, (address, _) in self._group.weights_of.items()}
            self._group.broadcast(peers_message(addresses))

    def _state_changed(self) -> None:
        self.view.ready.renew(self.epoch)
        self._lock.notify_all()
        self.on_change(self._progress())

    def _aborted(self, reason: str) -> None:
        self._changes.abandon(reason)
        self._steps.clear()
        self._lone.end()

    def _progress(self) -> Progress:
        steps, lone = self._steps.in_flight, self._lone
        return Progress(
            self.generations.state,
            self.generations.reason,
            self._group.generation,
            steps.steps + lone.steps,
            steps.jobs + lone.jobs,
            steps.queued + lone.queued,
            steps.running + lone.running,
            self.generations.holds,
            self.generations.broken,
            self.generations.aborted,
        )
