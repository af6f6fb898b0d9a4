"""`Coordinator`: forms the group, orders its steps, and changes its epoch. It never sees a tensor.

Members connect one stream each, and are known by their seats. A generation is one process group: prepared
(every owner has its experts), committed, joined, serving. When a member is lost or cannot run an entry, the
generation aborts and, once all members are there again, a fresh one forms. A step is sent to the members that
take part in it, and waits for nobody else.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch forgets to export it

from moeserve.experts.load import PHASES, Load
from moeserve.runtime.control.messages import (
    announcement_from,
    epoch_message,
    header_message,
    load_from,
    plans_from,
)
from moeserve.runtime.control.stream import Message
from moeserve.runtime.epoch import Change, Epoch
from moeserve.runtime.head.group import Group
from moeserve.runtime.head.in_flight import StepsInFlight
from moeserve.runtime.head.patience import Backoff, Formation, Patience
from moeserve.runtime.head.pending_change import Outcome
from moeserve.runtime.head.reception import Reception, Seat
from moeserve.runtime.head.sequencer import StepPace
from moeserve.runtime.head.two_phase_commit import TwoPhaseCommit

log = logging.getLogger(__name__)

FIRST_ATTEMPTS = 3  # that members may say have failed before the group ever serves; then it cannot start
SETTLE_SECONDS = 0.25  # after an abort, before the next generation: a killed rank's stream ends by then
ENDED = ("failed", "stopped")  # states that no other follows, except "stopped" after "failed"
GONE_LOOK_SECONDS = 0.05  # between looks whether a process that was given up has ended
BLAME_SECONDS = 0.2  # after a rank failed an entry: a peer that died is found by then, and is the cause


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


class Coordinator:
    """Threads: its reception's, one a member, and one that keeps the pace. All state is under one lock.

    `layers` are the decoder indices of the placement's layers.
    """

    def __init__(self, epoch: Epoch, layers: tuple[int, ...], pace: StepPace, host: str, token: str) -> None:
        self._group, room = Group(epoch), epoch.members
        self._lock, self._seats = self._group.lock, self._group.seats
        self._changes = TwoPhaseCommit(self._group, layers)
        self._steps = StepsInFlight(room.max_lanes, pace)
        self.patience = Patience()
        self._formation = Formation((), self.patience, 0.0)
        self._state, self._reason = "forming", "waiting for ranks"
        self._retries = Backoff()  # of generations that members say cannot form; deaths do not count
        self._unserved_since: float | None = (
            None  # when the group ceased to serve; None: serves, or never did
        )
        self._served = False  # whether any generation ever did
        self._form_at = math.inf
        # when to abort, unless a lost rank explains it before; why
        self._failing: tuple[float, str] | None = None
        self._unheard = set[int]()  # seats that have not answered since a member failed
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._store_address = f"{host}:{self._store.port}"
        self._reception = Reception(host, room.max_lanes + room.max_owners, token, self)
        self.address = self._reception.address
        self.draining = ""  # why lanes take no further call, though the group serves
        self._drained = set[int]()  # seats whose calls have ended since
        self._given_up = set[int]()  # pids of members that were parted with and may still run
        self.on_given_up: Callable[[int, int], None] = lambda rank, pid: None  # the launcher ends the process
        self.is_gone: Callable[[int], bool] = lambda pid: True  # whether that process has ended
        self.on_change: Callable[[Progress], None] = lambda progress: None
        self.observe_step: Callable[[int, float], None] = lambda layer, seconds: None  # of the whole group

    @property
    def epoch(self) -> Epoch:
        """The epoch that is served, or forms."""
        return self._group.epoch

    def start(self) -> None:
        """Begins to accept members, and to order their steps."""
        self._reception.send_seconds, self._changes.adopt_seconds = self.patience.send, self.patience.adopt
        self._reception.hello_seconds, self._changes.on_stuck = self.patience.hello, self._abort
        self._reception.start()
        threading.Thread(target=self._keep_pace, name="keep_pace", daemon=True).start()

    def stop(self, reason: str = "the service is stopping") -> None:
        """Ends the group: members are told to stop."""
        with self._lock:
            self._changes.abandon(reason)
            self._set_state("stopped", reason)
            self._group.broadcast({"kind": "stop"})
            for seat in self._seats.values():
                seat.stream.close()
            self._seats.clear()
            self._lock.notify_all()
        self._reception.close()

    def drain(self, seconds: float, reason: str = "the service is stopping") -> bool:
        """Has lanes take no further call, and waits until those under way have ended.

        Steps go on meanwhile. Returns whether all ended within `seconds`.
        """
        with self._lock:
            if self._state != "serving":
                return True
            self.draining = reason
            generation = self._group.generation
            self._group.broadcast(
                {"kind": "drain", "generation": generation, "reason": reason, "seconds": seconds}
            )
            self._lock.wait_for(
                lambda: (
                    self._group.generation != generation or self._drained >= set(self._group.members.seats)
                ),
                seconds,
            )
            return self._group.generation == generation and self._drained >= set(self._group.members.seats)

    def wait_serving(self, timeout: float) -> None:
        """Returns once the group serves. Raises TimeoutError or RuntimeError, with the reason it does not."""
        with self._lock:
            self._lock.wait_for(lambda: self._state in ("serving", *ENDED), timeout)
            if self._state == "serving":
                return
            if self._state in ENDED:
                raise RuntimeError(self._reason)
            raise TimeoutError(f"the group did not serve within {timeout:.0f} s: {self._reason}")

    def progress(self) -> Progress:
        """The group's state, the reason for it, and its counts."""
        with self._lock:
            return self._progress()

    def seats(self) -> dict[int, Seat]:
        """The members that are connected now, by seat."""
        with self._lock:
            return dict(self._seats)

    def load(self) -> Load:
        """Tokens by served layer and logical expert, as far as ranks have reported."""
        return Load(self.load_by_phase().sum(axis=0))

    def load_by_phase(self) -> np.ndarray:
        """The load of each of `PHASES`: `[phases, L, E]` float64."""
        with self._lock:
            loads = [seat.load for seat in self._seats.values() if seat.load is not None]
        return np.asarray(np.sum(loads, axis=0) if loads else np.zeros(self._load_shape))

    @property
    def _load_shape(self) -> tuple[int, int, int]:
        return len(PHASES), self.epoch.placement.layers, self.epoch.placement.experts

    def change(self, change: Change, timeout: float) -> Outcome:
        """Has every member prepare `change` while steps run, and commits it when all have; blocks until then.

        Abandoned, with the reason, when a member cannot prepare it, copies of one expert differ, the group
        aborts or `timeout` seconds pass; everything is then as it was. One change at a time.
        """
        with self._lock:
            if self._state != "serving":
                return Outcome(f"the group is {self._state}: {self._reason}")
            return self._changes.run(change, timeout)

    # -- members come and go --------------------------------------------------------------------------------

    def rank_connected(self, rank: int, seat: Seat, refused: str) -> None:
        """Seats a member; when all are seated, a generation forms.

        ValueError: it cannot start, comes too late, or the seat is a reserved one.
        """
        with self._lock:
            if rank not in self._group.members.seats:
                taken = list(self._group.members.seats)
                raise ValueError(f"seat {rank} is vacant: the members of this group have seats {taken}")
            if refused:
                self._refused(rank, refused)
                raise ValueError(refused)
            if rank in self._seats:
                if self._state not in ENDED:
                    self._abort(f"rank {rank} connected again")
                self._part_with(rank, f"pid {seat.pid} has taken its place", seat.pid)
            if self._state in ENDED:
                seat.stream.send({"kind": "stop"})
                raise ValueError(f"rank {rank} connected when the group had {self._state}")
            self._seats[rank] = seat
            if missing := self._group.missing:
                self._set_state(
                    "forming", self._reason if self._group.generation else f"waiting for ranks {missing}"
                )
            else:
                self._form_at = min(
                    self._form_at, time.monotonic() + (SETTLE_SECONDS if self._group.generation else 0)
                )
                self._lock.notify_all()

    def rank_lost(self, rank: int, seat: Seat, why: str) -> None:
        """Ends the generation of a member whose stream ended. A failure keeps its own reason."""
        with self._lock:
            if self._seats.get(rank) is not seat:
                return
            del self._seats[rank]
            if self._state not in ENDED:
                self._abort(f"rank {rank} (pid {seat.pid}) is lost: {why}")

    def message_received(self, rank: int, seat: Seat, message: Message) -> None:
        """Takes a member's message about its generation; one about an older generation does not count."""
        with self._lock:
            if message.get("generation") != self._group.generation:
                return  # from before an abort
            match message["kind"]:
                case "announce":
                    if self._state in ("serving", "joining"):
                        self._announced(rank, message)
                case "withdraw":
                    self._withdrawn(rank, message)
                case "done":
                    self._done(rank, message)
                case "report":
                    self._report(seat, message)
                case "here":
                    self._unheard.discard(rank)
                    self._formation.heard(rank, time.monotonic())
                    self._lock.notify_all()
                case "prepared":
                    seat.bytes_read, seat.weight_bytes = (
                        int(message["bytes_read"]),
                        int(message["weight_bytes"]),
                    )
                    self._formation.has_prepared(rank, time.monotonic())
                    if self._state == "preparing" and self._formation.prepared:
                        self._join()
                case "joined":
                    seat.plans, seat.generation = plans_from(message), self._group.generation
                    self._formation.has_joined(rank)
                    if self._state == "joining" and self._formation.joined:
                        self._serve()
                case "voted" | "adopted":
                    self._changes.message_received(rank, message)
                case "drained":
                    self._drained.add(rank)
                    self._lock.notify_all()
                case "failed":
                    self._member_failed(rank, str(message["reason"]))
                case unknown:
                    raise ValueError(f"unknown message {unknown!r} from rank {rank}")

    # -- a generation ---------------------------------------------------------------------------------------

    def _form(self, now: float) -> None:
        """Begins a fresh generation, now that all members are connected and those before them have ended."""
        self._given_up = {pid for pid in self._given_up if not self.is_gone(pid)}
        if self._given_up:
            self._form_at = now + GONE_LOOK_SECONDS
            return
        self._form_at = math.inf
        self._group.generation += 1
        self._formation = Formation(self._group.members.seats, self.patience, now)
        self._set_state("preparing", f"generation {self._group.generation} is loading experts")
        self._group.broadcast(
            {"kind": "prepare", "generation": self._group.generation, "epoch": epoch_message(self.epoch)}
        )

    def _join(self) -> None:
        """Has the members form a process group; each is told its position, which is its rank there."""
        self._set_state("joining", f"generation {self._group.generation} is joining")
        members = self._group.members
        entry = {
            "kind": "join",
            "generation": self._group.generation,
            "epoch": self.epoch.number,
            "store": self._store_address,
            "size": len(members),
        }
        for number, seat in list(self._seats.items()):
            self._group.send(seat, entry | {"position": members.position(number)})

    def _serve(self) -> None:
        self._retries.reset()
        self._served, self._unserved_since = True, None
        self._set_state("serving", "")
        log.info(
            "generation %d serves epoch %d with %d members",
            self._group.generation,
            self.epoch.number,
            len(self._group.members),
        )
        self._emit()

    def _abort(self, reason: str, *, said: bool = False) -> None:
        """Ends the generation: doors fail their jobs, and a fresh one forms when all members are there.

        `said`: a member says that it cannot go on. If this generation never served, the next one backs off.
        """
        log.warning("generation %d aborts: %s", self._group.generation, reason)
        pause = SETTLE_SECONDS
        if said and self._state in ("preparing", "joining"):
            pause = max(pause, self._retries.next())
            log.warning("the next generation is tried in %.1f s", pause)
        if self._state == "serving":
            self._unserved_since = time.monotonic()
        self._changes.abandon(reason)
        self._steps.clear()
        self._failing = None
        aborted, self._group.generation = self._group.generation, self._group.generation + 1
        self._group.broadcast({"kind": "abort", "generation": aborted, "reason": reason})
        if not self._served and self._retries.failures >= FIRST_ATTEMPTS:
            self._set_state("failed", reason)
            return
        self._set_state("forming", reason)
        self._form_at = math.inf if self._group.missing else time.monotonic() + pause
        self._lock.notify_all()

    def _member_failed(self, rank: int, reason: str) -> None:
        """A member cannot go on. It may be the one that waited: the first one's word has all others asked."""
        if self._failing is None:
            self._failing = (time.monotonic() + BLAME_SECONDS, reason)
            self._unheard = set(self._seats)
            self._group.broadcast({"kind": "ask", "generation": self._group.generation})
        self._unheard.discard(rank)
        self._lock.notify_all()

    def _blamed(self, reason: str) -> str:
        """The reason of a failure, led by those who do not even answer."""
        silent = [
            f"rank {rank} (pid {self._seats[rank].pid})" for rank in sorted(self._unheard & set(self._seats))
        ]
        return f"no answer from {', '.join(silent)}; {reason}" if silent else reason

    def _end_waits(self, now: float) -> None:
        """Ends a formation that waits for a member for too long."""
        if self._state == "preparing" and (silent := self._formation.silent(now)):
            named = [f"rank {rank} (pid {self._seats[rank].pid}): {why}" for rank, why in silent.items()]
            for rank, why in silent.items():
                self._part_with(rank, why)
            self._abort("; ".join(named))
        elif self._state == "joining" and (stuck := self._formation.stuck(now)):
            self._abort(stuck)

    def _part_with(self, rank: int, why: str, heir: int = 0) -> None:
        """Takes a member's seat: its process is told to stop, and the launcher ends it, unless it is the one
        that takes the seat again, of pid `heir`.
        """
        seat = self._seats.pop(rank)
        log.warning("rank %d (pid %d) is given up: %s", rank, seat.pid, why)
        self._group.send(seat, {"kind": "stop"})
        seat.stream.close()
        if seat.pid != heir:
            self._given_up.add(seat.pid)
            self.on_given_up(rank, seat.pid)

    def _waits_end(self) -> float:
        """When a bound of the formation passes."""
        return self._formation.due() if self._state in ("preparing", "joining") else math.inf

    def _refused(self, rank: int, reason: str) -> None:
        """Notes that a rank cannot start. The service ends only where the group has never served: else the
        launcher tries again.
        """
        if self._state in ENDED:
            return
        if not self._served:
            self._set_state("failed", reason)
        elif rank in self._group.missing:
            self._set_state(self._state, reason)

    def _give_up_at(self) -> float:
        """When the service ends because it has not served for so long."""
        if self._unserved_since is None or not self.patience.give_up:
            return math.inf
        return self._unserved_since + self.patience.give_up

    # -- steps ----------------------------------------------------------------------------------------------

    def _emit(self) -> float | None:
        """Sends steps that are due to the members that take part; returns when the next one is, or None."""
        while self._state == "serving" and self._failing is None:
            now = time.monotonic()
            due = self._steps.due(now)
            if due is None or due > now:
                if due is not None:
                    self._lock.notify_all()
                return due
            members = self._group.members
            step = self._steps.start(self.epoch.number, now, members)
            if step is None:
                return None
            for number in step.seats(members):
                header = header_message(step.header(members.at(number)), self._group.generation)
                self._group.send(self._seats[number], header)
        return None

    def _announced(self, rank: int, message: Message) -> None:
        """Queues the job of a message. Raises ValueError for a member that has no lane."""
        lane = self._group.members.at(rank).lane
        if lane is None:
            raise ValueError(f"seat {rank} has no lane, and announced job {message['job']}")
        now = time.monotonic()
        self._steps.announce(announcement_from(message, lane, now), now)
        self._emit()

    def _withdrawn(self, rank: int, message: Message) -> None:
        """Forgets jobs that no step has taken yet."""
        lane = self._group.members.at(rank).lane
        if lane is not None:
            self._steps.withdraw(lane, {int(job) for job in message["jobs"]})

    def _done(self, rank: int, message: Message) -> None:
        finished = self._steps.finish(rank, int(message["step"]), time.monotonic())
        if finished is not None:
            self.observe_step(*finished)
            self._emit()

    def _report(self, seat: Seat, message: Message) -> None:
        seat.steps, seat.expert_rows = int(message["steps"]), int(message["expert_rows"])
        seat.load = load_from(message, self._load_shape)

    def _keep_pace(self) -> None:
        """Runs the pace's thread; the group fails, with the reason, when it cannot go on."""
        try:
            self._start_what_is_due()
        except Exception as error:
            log.exception("the coordinator's thread keep_pace ends")
            with self._lock:
                self._set_state("failed", f"the coordinator cannot go on: {type(error).__name__}: {error}")

    def _start_what_is_due(self) -> None:
        """Starts what has to wait: steps that gather company, and the next generation."""
        with self._lock:
            while self._state not in ENDED:
                now = time.monotonic()
                if self._form_at <= now and not self._group.missing:
                    self._form(now)
                self._end_waits(now)
                if self._failing is not None and self._failing[0] <= now:
                    self._abort(self._blamed(self._failing[1]), said=True)
                if self._give_up_at() <= now:
                    self._set_state("failed", self._gave_up())
                    return
                due = self._emit() if self._failing is None else self._failing[0]
                due = math.inf if due is None else due
                until = min(due, self._form_at, self._waits_end(), self._give_up_at())
                self._lock.wait(None if math.isinf(until) else max(0.0, until - time.monotonic()))

    # -- small things ---------------------------------------------------------------------------------------

    def _gave_up(self) -> str:
        limit, missing = self.patience.give_up, self._group.missing
        who = f"ranks {missing} are missing; " if missing else ""
        return f"not served for cluster.give_up_seconds = {limit:g}: {who}{self._reason}"

    def _set_state(self, state: str, reason: str) -> None:
        self._state, self._reason = state, reason
        self._lock.notify_all()
        self.on_change(self._progress())

    def _progress(self) -> Progress:
        return Progress(
            self._state,
            self._reason,
            self._group.generation,
            self._steps.steps,
            self._steps.jobs,
            self._steps.queued,
            self._steps.running,
        )
