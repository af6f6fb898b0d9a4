"""`StepsInFlight`: a group's steps, from jobs that gather to the last member that has finished.

Like the `Sequencer` that it asks it has no thread, socket or clock of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from moeserve.dispatch.members import Members
from moeserve.runtime.control.run_messages import AskedRun, OrderedRun
from moeserve.runtime.ordering.gathering import Gathering, Last
from moeserve.runtime.ordering.run_queue import RunQueue
from moeserve.runtime.ordering.sequencer import Sequencer, StepPace
from moeserve.runtime.step import Announcement, Step

MOST = 2
"""Steps and runs at the members: a header may wait there while the step before it runs."""

GATHERS_SECONDS = 0.05
"""After a job, in which more of its lane are expected: of callers whom that gathers, or of others."""


@dataclass(frozen=True)
class _Running:
    """A step that was sent to the members that take part, and that not all of them have finished; or a run,
    which has no jobs.
    """

    layer: int  # of a run: the last one's
    started: float
    left: set[int]  # seats that take part and have not finished it
    jobs: int
    rows: int
    alone: bool  # no other step was under way when it started
    lanes: frozenset[int | None]  # that bring rows
    run: AskedRun | None = None


class StepsInFlight:
    """Jobs that wait, steps that run, and how many of both there were. Not thread-safe: its owner locks."""

    def __init__(self, max_lanes: int, pace: StepPace) -> None:
        self.steps = self.jobs = 0  # since this was made
        self._sequencer = Sequencer(max_lanes, pace)
        self._runs = RunQueue()
        self._gather = pace.gather
        self._gathering = Gathering(pace.gather)
        self._last: Last | None = None
        self._running: dict[int, _Running] = {}  # by step number
        self._ended_at = 0.0  # the last step
        self.closed = frozenset[int]()  # layers that no step may take now
        self._gathers: dict[int, float] = {}  # lanes that gather callers, and when each last had a job
        self._called = -math.inf  # when a job last came that no lane has gathered
        self._went_on = 0.0  # when a step was sent or a member finished one

    @property
    def queued(self) -> int:
        """Jobs that are in no step yet."""
        return self._sequencer.queued

    @property
    def idle(self) -> bool:
        """Whether neither a job nor a run waits to be begun."""
        return self._sequencer.empty and not self._runs

    @property
    def asked(self) -> int:
        """Runs that members want and that were not sent."""
        return len(self._runs)

    @property
    def next_number(self) -> int:
        """The number of the next step."""
        return self._sequencer.number

    def number_from(self, number: int) -> None:
        """Numbers the next step so, or higher: numbers rise."""
        self._sequencer.number = max(self._sequencer.number, number)

    @property
    def went_on(self) -> float:
        """When a step was last sent, or a member finished one."""
        return self._went_on

    @property
    def running(self) -> int:
        """Steps and runs that not all who take part have finished."""
        return len(self._running)

    @property
    def standing(self) -> tuple[int, float] | None:
        """The oldest step under way, and since when none has gone on; None where none is under way."""
        return (min(self._running), self._went_on) if self._running else None

    def announce(self, job: Announcement, now: float) -> None:
        """Queues a job that a door has ready. Raises ValueError as `Sequencer.announce`."""
        self.jobs += 1
        if job.gathered:
            self._gathers[job.lane] = now
        else:
            self._called = now
        self._sequencer.announce(job, now)
        self._gathering.returns.announced(job.layer, now)

    def ask(self, run: AskedRun) -> None:
        """Queues a run that a member wants. Raises ValueError where too many of its runs wait."""
        self._runs.add(run)

    def refuse_runs(self) -> list[AskedRun]:
        """Takes out of the queue the runs of layers that no step may take now."""
        return self._runs.without(self.closed)

    def shared_runs(self, *, held: bool = False) -> list[tuple[AskedRun, float]]:
        """Runs under way that others wait behind, or will: jobs, steps, or runs of another member; with when
        each was sent. held: nothing begins before all of them have ended, as where members join or leave.

        A step of the run's own lane that began before it is no company, though not all members have said that
        it is over: its caller may be the run's, and have the answer.
        """
        return [
            (one.run, one.started)
            for number, one in self._running.items()
            if one.run is not None and (held or self._others(number, one, one.run.seat))
        ]

    def _others(self, number: int, run: _Running, seat: int) -> bool:
        """Whether others than the caller of the run of this number want steps."""
        under_way = any(
            one.lanes - run.lanes or (one.run is None and at > number) for at, one in self._running.items()
        )
        return bool(under_way or self._sequencer.queued or self._runs.of_others(seat))

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
        if self._sequencer.full(layer) or self._gathered(layer, now):
            return now
        return self._gathering.start_at(layer, self._last, self._ended_at, now)

    def _gathered(self, layer: int, now: float) -> bool:
        """Whether all jobs of `layer` are of the one lane that gathers callers itself, and nobody else calls:
        who comes while they wait here comes with that lane's next job.
        """
        if now - self._called < GATHERS_SECONDS:
            return False
        lanes = self._sequencer.gathered(layer)
        return len(lanes) == 1 and all(
            lane in lanes or now - at > GATHERS_SECONDS for lane, at in self._gathers.items()
        )

    def start(self, epoch: int, now: float, members: Members) -> Step | None:
        """The next step, which those of `members` that take part have to be told of; nobody else is waited
        for. None when the jobs that waited are too late.
        """
        due = {layer for layer in self._open() if self._start_at(layer, now) <= now}
        step = self._sequencer.next_step(epoch, now, due)
        if step is not None:
            self._runs.stepped()
            self.steps += 1
            self._went_on = now
            jobs, rows = sum(map(len, step.jobs)), sum(step.lane_rows)
            seats = set(step.seats(members))
            lanes = frozenset(lane for lane, count in enumerate(step.lane_rows) if count)
            self._running[step.number] = _Running(
                step.layer, now, seats, jobs, rows, not self._running, lanes
            )
            self._last = Last(step.layer, rows, now, running=True)
        return step

    def start_run(self, epoch: int, now: float, members: Members) -> OrderedRun | None:
        """The run that is next, which those have to be told of who take part: as in a step to which the lane
        of whoever asked brings rows. None where none is asked for, as many steps run as may, or it is a
        step's turn: where both wait, they take turns.
        """
        if len(self._running) >= MOST or not self._runs:
            return None
        due = any(self._start_at(layer, now) <= now for layer in self._open())
        asked = self._runs.next(step_waits=due)
        if asked is None:
            return None
        number = self._sequencer.take_numbers(len(asked.layers))
        self.steps += len(asked.layers)
        self._went_on = now
        seats, alone = set(run_seats(asked, members)), not self._running
        lanes = frozenset([members.at(asked.seat).lane])
        self._running[number] = _Running(asked.layers[-1], now, seats, 0, asked.rows, alone, lanes, asked)
        return OrderedRun(asked, number, epoch)

    def finish(self, seat: int, number: int, now: float) -> tuple[int, float] | None:
        """Notes that a seat has finished a step, or a run by its first step's number; the last one of a step
        gets its layer and the group's seconds.
        """
        step = self._running.get(number)
        if step is None:
            return None
        self._went_on = now
        step.left.discard(seat)
        if step.left:
            if step.run is None:
                self._gathering.returns.ending()
            return None
        del self._running[number]
        if not self._running and self._last is not None:
            self._last = replace(self._last, running=False)
        before, self._ended_at = self._ended_at, now
        if step.run is not None:
            return None  # it waited for its caller, and tells nothing of what a step takes
        seconds = now - max(step.started, before)
        self._gathering.returns.answered(step.layer, step.jobs, now)
        self._gathering.step_ended(step.rows, seconds, None if step.alone else before - step.started)
        return step.layer, seconds

    def clear(self) -> None:
        """Forgets every job, step and run: the group has ended, doors have failed or announce again, and
        members end the passes of their runs.
        """
        self._sequencer.clear()
        self._runs.clear()
        self._gathering = Gathering(self._gather)  # another generation may have other members
        self._gathers.clear()
        self._called = -math.inf
        self._running.clear()
        self._last = None


def run_seats(run: AskedRun, members: Members) -> tuple[int, ...]:
    """The seats that take part in a run, ascending."""
    lane = members.at(run.seat).lane
    return members.in_step(tuple(run.rows if at == lane else 0 for at in range(members.max_lanes)))
