"""`StepOrder`: a group's steps on their way: jobs that are announced, headers sent, members that are done;
and runs of steps for callers' GPUs, which members ask for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection

from moeserve.runtime.control.frames import encoded
from moeserve.runtime.control.messages import announcements_from, header_message
from moeserve.runtime.control.run_messages import OrderedRun, asked_from, refused_message, run_message
from moeserve.runtime.control.stream import Message
from moeserve.runtime.head.group import Group
from moeserve.runtime.head.in_flight import StepsInFlight, run_seats
from moeserve.runtime.head.sequencer import StepPace

COMPANY_SECONDS = 0.1
"""A member whose runs others wait behind is told so at once, and again after so long."""


class StepOrder:
    """Sends steps that are due to the members that take part. The caller of any method holds the group's
    lock. `layers` are the decoder indices that are served; `may_begin` says whether a step may begin now.
    """

    def __init__(
        self, group: Group, layers: Collection[int], pace: StepPace, may_begin: Callable[[], bool]
    ) -> None:
        self._group, self._layers, self._may_begin, self._pace = group, layers, may_begin, pace
        self._told_at: dict[int, float] = {}  # by seat: when it was last told of company
        self.in_flight = StepsInFlight(group.members.max_lanes, pace)
        self.sleeps_until = 0.0  # the thread that begins steps which gather company; it is woken before
        self.observe: Callable[[int, float], None] = lambda layer, seconds: None  # a step of the whole group

    def begin(self) -> float | None:
        """Begins steps and runs that are due; returns when the next step is, or None."""
        due = self._begin()
        self._tell_company(time.monotonic())
        return due

    def _begin(self) -> float | None:
        while self._may_begin():
            now = time.monotonic()
            run = self.in_flight.start_run(self._group.epoch.number, now, self._group.members)
            if run is not None:
                self._send_run(run)
                continue
            due = self.in_flight.due(now)
            if due is None or due > now:
                if due is not None and due < self.sleeps_until:
                    self._group.lock.notify_all()
                return due
            members = self._group.members
            step = self.in_flight.start(self._group.epoch.number, now, members)
            if step is None:
                continue  # those jobs were too late; others may wait
            frames: dict[tuple[tuple[int, int], ...], bytes] = {}  # by a member's jobs: most have none
            for number in step.seats(members):
                header = step.header(members.at(number))
                if header.jobs not in frames:
                    frames[header.jobs] = encoded(header_message(header, self._group.generation))
                self._group.send_frame(self._group.seats[number], frames[header.jobs])
        return None

    def _send_run(self, run: OrderedRun) -> None:
        frame = encoded(run_message(run, self._group.generation))
        for number in run_seats(run.asked, self._group.members):
            self._group.send_frame(self._group.seats[number], frame)

    def _tell_company(self, now: float) -> None:
        """Tells members whose runs others wait behind: those leave their runs, and ask step by step."""
        for run, started in self.in_flight.shared_runs(held=not self._may_begin()):
            if run.seat not in self._group.seats:  # it has left
                continue
            since = now - COMPANY_SECONDS if len(run.layers) == 1 else max(started, now - COMPANY_SECONDS)
            if self._told_at.get(run.seat, -math.inf) <= since:
                self._told_at[run.seat] = now
                told = {"kind": "company", "generation": self._group.generation}
                self._group.send(self._group.seats[run.seat], told)

    def asked(self, rank: int, message: Message) -> None:
        """Queues a run that a member wants. Raises ValueError for a member that has no lane, and for a run
        that cannot be.
        """
        if self._group.members.at(rank).lane is None:
            raise ValueError(f"seat {rank} has no lane, and asked for a run")
        self.in_flight.ask(asked_from(rank, message, self._pace.lane_rows, self._layers))
        self._refuse_runs()
        self.begin()

    def _refuse_runs(self) -> None:
        """Tells those who asked for runs of layers that members still read."""
        for run in self.in_flight.refuse_runs():
            first = next(layer for layer in run.layers if layer in self.in_flight.closed)
            told = refused_message(run, self._group.generation, f"layer {first} is being restored")
            self._group.send(self._group.seats[run.seat], told)

    def announced(self, rank: int, message: Message) -> None:
        """Queues the jobs of a message. Raises ValueError for a member that has no lane."""
        lane = self._group.members.at(rank).lane
        if lane is None:
            raise ValueError(f"seat {rank} has no lane, and announced job {message['job']}")
        now = time.monotonic()
        for job in announcements_from(message, lane, now):
            self.in_flight.announce(job, now)
        self.begin()

    def withdrawn(self, rank: int, message: Message) -> None:
        """Forgets jobs that no step has taken yet."""
        lane = self._group.members.at(rank).lane
        if lane is not None:
            self.in_flight.withdraw(lane, {int(job) for job in message["jobs"]})

    def done(self, rank: int, message: Message) -> None:
        """A member has finished a step, or a run; with the last one others may begin."""
        before = self.in_flight.running
        finished = self.in_flight.finish(rank, int(message["step"]), time.monotonic())
        if finished is not None:
            self.observe(*finished)
        if self.in_flight.running < before:
            self.begin()

    def close_layers(self, closed: Collection[int]) -> None:
        """Has steps of all layers (decoder indices) but these. Members are told: their calls wait."""
        if (layers := frozenset(closed)) != self.in_flight.closed:
            told = {"kind": "open_layers", "generation": self._group.generation, "closed": sorted(layers)}
            self._group.broadcast(told)
        self.in_flight.closed = layers
        self._refuse_runs()
        self.begin()

    def clear(self) -> None:
        """The generation has ended: jobs are announced to the next one, which says what layers are closed."""
        self.in_flight.clear()
        self.in_flight.closed = frozenset()
        self._told_at = {}
