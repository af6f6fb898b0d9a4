"""`StepsInFlight`: a group's steps, from jobs that gather to the last member that has finished.

Like the `Sequencer` that it asks it has no thread, socket or clock of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from moeserve.dispatch.members import Members
from moeserve.runtime.head.gathering import Gathering, Last
from moeserve.runtime.head.sequencer import Sequencer, StepPace
from moeserve.runtime.step import Announcement, Step

MOST = 2
"""Steps at the members: a header may wait there while the step before it runs."""


@dataclass(frozen=True)
class _Running:
    """A step that was sent to the members that take part, and that not all of them have finished."""

    layer: int
    started: float
    left: set[int]  # seats that take part and have not finished it
    jobs: int
    rows: int
    alone: bool  # no other step was under way when it started


class StepsInFlight:
    """Jobs that wait, steps that run, and how many of both there were. Not thread-safe: its owner locks."""

    def __init__(self, max_lanes: int, pace: StepPace) -> None:
        self.steps = self.jobs = 0  # since the service began
        self._sequencer = Sequencer(max_lanes, pace)
        self._gather = pace.gather
        self._gathering = Gathering(pace.gather)
        self._last: Last | None = None
        self._running: dict[int, _Running] = {}  # by step number
        self._ended_at = 0.0  # the last step
        self.closed = frozenset[int]()  # layers that no step may take now
        self._went_on = 0.0  # when a step was sent or a member finished one

    @property
    def queued(self) -> int:
        """Jobs that are in no step yet."""
        return self._sequencer.queued

    @property
    def running(self) -> int:
        """Steps that not all who take part have finished."""
        return len(self._running)

    @property
    def standing(self) -> tuple[int, float] | None:
        """The oldest step under way, and since when none has gone on; None where none is under way."""
        return (min(self._running), self._went_on) if self._running else None

    def announce(self, job: Announcement, now: float) -> None:
        """Queues a job that a door has ready. Raises ValueError as `Sequencer.announce`."""
        self.jobs += 1
        self._sequencer.announce(job, now)
        self._gathering.returns.announced(job.layer, now)

    def withdraw(self, lane: int, jobs: Collection[int]) -> None:
        """Forgets jobs of a lane that are in no step yet: their callers have left."""
        self._sequencer.withdraw(lane, jobs)

    def due(self, now: float) -> float | None:
        """When the next step may start; None: nothing waits, or as many steps run as may."""
        if len(self._running) >= MOST:
            return None
        return min((self._start_at(layer, now) for layer in self._open()), default=None)

    def _open(self) -> list[int]:
        """Layers that jobs wait for, and that steps may take."""
        return [layer for layer in self._sequencer.layers if layer not in self.closed]

    def _start_at(self, layer: int, now: float) -> float:
        """When the jobs that wait for `layer` should start."""
        if self._sequencer.full(layer):
            return now
        return self._gathering.start_at(layer, self._last, self._ended_at, now)

    def start(self, epoch: int, now: float, members: Members) -> Step | None:
        """The next step, which those of `members` that take part have to be told of; nobody else is waited
        for. None when the jobs that waited are too late.
        """
        due = {layer for layer in self._open() if self._start_at(layer, now) <= now}
        step = self._sequencer.next_step(epoch, now, due)
        if step is not None:
            self.steps += 1
            self._went_on = now
            jobs, rows = sum(map(len, step.jobs)), sum(step.lane_rows)
            seats = set(step.seats(members))
            self._running[step.number] = _Running(step.layer, now, seats, jobs, rows, not self._running)
            self._last = Last(step.layer, rows, now, running=True)
        return step

    def finish(self, seat: int, number: int, now: float) -> tuple[int, float] | None:
        """Notes that a seat has finished a step; the last one gets its layer and the group's seconds."""
        step = self._running.get(number)
        if step is None:
            return None
        self._went_on = now
        step.left.discard(seat)
        if step.left:
            self._gathering.returns.ending()
            return None
        del self._running[number]
        if not self._running and self._last is not None:
            self._last = replace(self._last, running=False)
        before, self._ended_at = self._ended_at, now
        seconds = now - max(step.started, before)
        self._gathering.returns.answered(step.layer, step.jobs, now)
        self._gathering.step_ended(step.rows, seconds, None if step.alone else before - step.started)
        return step.layer, seconds

    def clear(self) -> None:
        """Forgets every job and step: the group has ended, and doors have failed or announce again."""
        self._sequencer.clear()
        self._gathering = Gathering(self._gather)  # another generation may have other members
        self._running.clear()
        self._last = None
