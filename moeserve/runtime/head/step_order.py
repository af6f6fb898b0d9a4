"""`StepOrder`: a group's steps on their way: jobs that are announced, headers sent, members that are done."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from moeserve.runtime.control.frames import encoded
from moeserve.runtime.control.messages import announcements_from, header_message
from moeserve.runtime.control.stream import Message
from moeserve.runtime.head.group import Group
from moeserve.runtime.head.in_flight import StepsInFlight
from moeserve.runtime.head.sequencer import StepPace


class StepOrder:
    """Sends steps that are due to the members that take part. The caller of any method holds the group's
    lock. `may_begin` says whether a step may begin now.
    """

    def __init__(self, group: Group, pace: StepPace, may_begin: Callable[[], bool]) -> None:
        self._group, self._may_begin = group, may_begin
        self.in_flight = StepsInFlight(group.members.max_lanes, pace)
        self.sleeps_until = 0.0  # the thread that begins steps which gather company; it is woken before
        self.observe: Callable[[int, float], None] = lambda layer, seconds: None  # a step of the whole group

    def begin(self) -> float | None:
        """Begins steps that are due; returns when the next one is, or None."""
        while self._may_begin():
            now = time.monotonic()
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
        """A member has finished a step; with the last one others may begin."""
        finished = self.in_flight.finish(rank, int(message["step"]), time.monotonic())
        if finished is not None:
            self.observe(*finished)
            self.begin()

    def close_layers(self, closed: Collection[int]) -> None:
        """Has steps of all layers (decoder indices) but these. Members are told: their calls wait."""
        if (layers := frozenset(closed)) != self.in_flight.closed:
            told = {"kind": "open_layers", "generation": self._group.generation, "closed": sorted(layers)}
            self._group.broadcast(told)
        self.in_flight.closed = layers
        self.begin()

    def clear(self) -> None:
        """The generation has ended: jobs are announced to the next one, which says what layers are closed."""
        self.in_flight.clear()
        self.in_flight.closed = frozenset()
