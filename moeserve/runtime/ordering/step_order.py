"""`StepOrder`: a group's steps on their way: jobs that are announced, headers sent, members that are done;
and runs of steps for callers' GPUs, which members ask for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from moeserve.dispatch.members import Members
from moeserve.runtime.control.messages import announcements_from
from moeserve.runtime.control.run_messages import AskedRun, OrderedRun, asked_from
from moeserve.runtime.control.stream import Message
from moeserve.runtime.ordering.in_flight import StepsInFlight
from moeserve.runtime.ordering.sequencer import StepPace
from moeserve.runtime.step import Announcement, Step

COMPANY_SECONDS = 0.1
"""A member whose runs others wait behind is told so at once, and again after so long."""


class Audience(Protocol):
    """Those who take part in steps, and how they are told. Nothing here waits."""

    @property
    def members(self) -> Members:
        """Who belongs to the group."""

    @property
    def epoch(self) -> int:
        """The number of the epoch that steps are of."""

    def step(self, step: Step) -> None:
        """Tells all who take part in a step of it."""

    def run(self, run: OrderedRun) -> None:
        """Tells all who take part in a run of it."""

    def refuse(self, run: AskedRun, why: str) -> None:
        """Tells the member that asked for a run that there will be none."""

    def company(self, seat: int) -> bool:
        """Tells a member that others wait behind its runs; False where it has left."""

    def layers_closed(self, layers: Collection[int]) -> None:
        """Tells all members that steps run of all layers but these."""

    def sooner(self) -> None:
        """Wakes the thread that begins steps which gather company: one is due before it would wake."""


class StepOrder:
    """Begins steps that are due. Its owner locks. `layers` are the decoder indices that are served;
    `may_begin` says whether a step may begin now.
    """

    def __init__(
        self, audience: Audience, layers: Collection[int], pace: StepPace, may_begin: Callable[[], bool]
    ) -> None:
        self._audience, self._layers, self._may_begin, self._pace = audience, layers, may_begin, pace
        self._told_at: dict[int, float] = {}  # by seat: when it was last told of company
        self.in_flight = StepsInFlight(audience.members.max_lanes, pace)
        self.sleeps_until = 0.0  # the thread that begins steps which gather company; it is woken before
        self.observe: Callable[[int, float], None] = lambda layer, seconds: None  # a step of the whole group

    def begin(self) -> float | None:
        """Begins steps and runs that are due; returns when the next step is, or None."""
        due = self._begin()
        self._tell_company(time.monotonic())
        return due

    def _begin(self) -> float | None:
        audience = self._audience
        while not self.in_flight.idle and self._may_begin():
            now = time.monotonic()
            run = self.in_flight.start_run(audience.epoch, now, audience.members)
            if run is not None:
                audience.run(run)
                continue
            due = self.in_flight.due(now)
            if due is None or due > now:
                if due is not None and due < self.sleeps_until:
                    audience.sooner()
                return due
            step = self.in_flight.start(audience.epoch, now, audience.members)
            if step is not None:  # else those jobs were too late; others may wait
                audience.step(step)
        return None

    def _tell_company(self, now: float) -> None:
        """Tells members whose runs others wait behind: those leave their runs, and ask step by step."""
        for run, started in self.in_flight.shared_runs(held=not self._may_begin()):
            since = now - COMPANY_SECONDS if len(run.layers) == 1 else max(started, now - COMPANY_SECONDS)
            told = self._told_at.get(run.seat, -math.inf)
            if told <= since and self._audience.company(run.seat):
                self._told_at[run.seat] = now

    def asked(self, rank: int, message: Message) -> None:
        """Queues a run that a member wants. Raises ValueError for a member that has no lane, and for a run
        that cannot be.
        """
        if self._audience.members.at(rank).lane is None:
            raise ValueError(f"seat {rank} has no lane, and asked for a run")
        self.in_flight.ask(asked_from(rank, message, self._pace.lane_rows, self._layers))
        self._refuse_runs()
        self.begin()

    def _refuse_runs(self) -> None:
        """Tells those who asked for runs of layers that members still read."""
        for run in self.in_flight.refuse_runs():
            first = next(layer for layer in run.layers if layer in self.in_flight.closed)
            self._audience.refuse(run, f"layer {first} is being restored")

    def announced(self, rank: int, message: Message) -> None:
        """Queues the jobs of a message. Raises ValueError for a member that has no lane."""
        lane = self._audience.members.at(rank).lane
        if lane is None:
            raise ValueError(f"seat {rank} has no lane, and announced job {message['job']}")
        self.announce(announcements_from(message, lane, time.monotonic()))

    def announce(self, jobs: Iterable[Announcement]) -> None:
        """Queues jobs. Raises ValueError as `Sequencer.announce`."""
        now = time.monotonic()
        for job in jobs:
            self.in_flight.announce(job, now)
        self.begin()

    def withdrawn(self, rank: int, message: Message) -> None:
        """Forgets jobs that no step has taken yet."""
        lane = self._audience.members.at(rank).lane
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
            self._audience.layers_closed(layers)
        self.in_flight.closed = layers
        self._refuse_runs()
        self.begin()

    def clear(self) -> None:
        """The generation has ended: jobs are announced to the next one, which says what layers are closed."""
        self.in_flight.clear()
        self.in_flight.closed = frozenset()
        self._told_at = {}
