"""`Sequencer`: turns announced jobs into steps, by layer, those first that are due first, within a token
budget.

It decides, and nothing else: no thread, no socket, no clock of its own, so that its rules can be tested as a
function.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Self

from moeserve.runtime.sections import StepConfig
from moeserve.runtime.step import FIRST_NUMBER, Announcement, Step


@dataclass(frozen=True)
class StepPace:
    """Bounds of a step, and how long a job may wait for company.

    gather: seconds; callers who stay away for longer after an answer are not waited for; `Gathering` says who
    is. A lone caller never waits.
    """

    lane_rows: int
    step_rows: int
    gather: float = 0.004
    due: float = 1.0  # a job is due so long after it came, or at its deadline where that is earlier

    @classmethod
    def of(cls, step: StepConfig) -> Self:
        """The pace that is configured."""
        return cls(step.lane_rows, step.max_step_tokens, step.gather_seconds, step.due_seconds)


@dataclass(eq=False)
class _Queue:
    jobs: deque[tuple[float, Announcement]] = field(default_factory=deque)  # (arrival, job)
    rows: dict[int, int] = field(default_factory=dict)  # of these jobs, by lane

    def add(self, now: float, job: Announcement) -> None:
        self.jobs.append((now, job))
        self.rows[job.lane] = self.rows.get(job.lane, 0) + job.rows

    def keep(self, jobs: Iterable[tuple[float, Announcement]]) -> None:
        """Has only these jobs from now on."""
        self.jobs, self.rows = deque(), {}
        for at, job in jobs:
            self.add(at, job)


class Sequencer:
    """Queues of announced jobs, one a layer. Not thread-safe: its owner holds a lock."""

    def __init__(self, max_lanes: int, pace: StepPace) -> None:
        self._max_lanes = max_lanes
        self._pace = pace
        self._queues: dict[int, _Queue] = {}
        self.number = FIRST_NUMBER  # of the next step; it rises for as long as the service lives

    @property
    def queued(self) -> int:
        """How many jobs are in no step yet."""
        return sum(len(queue.jobs) for queue in self._queues.values())

    @property
    def empty(self) -> bool:
        """Whether no job waits."""
        return not any(queue.jobs for queue in self._queues.values())

    @property
    def layers(self) -> list[int]:
        """Layers that jobs wait for."""
        return [layer for layer, queue in self._queues.items() if queue.jobs]

    def full(self, layer: int) -> bool:
        """Whether the jobs of `layer` fill a lane, or a step."""
        rows = self._queues[layer].rows.values()
        return max(rows) >= self._pace.lane_rows or sum(rows) >= self._pace.step_rows

    def gathered(self, layer: int) -> set[int]:
        """The lanes of the jobs of `layer`, where all of them have gathered their callers themselves."""
        jobs = self._queues[layer].jobs
        return {job.lane for _, job in jobs} if all(job.gathered for _, job in jobs) else set()

    def announce(self, job: Announcement, now: float) -> None:
        """Queues a job that a door has ready. Raises ValueError for a lane that there is no room for, and
        for rows that are none or over the lane's capacity: doors split first.
        """
        if not 0 <= job.lane < self._max_lanes:
            raise ValueError(f"job {job.job} is of lane {job.lane}; there are {self._max_lanes} lanes")
        if not 1 <= job.rows <= self._pace.lane_rows:
            raise ValueError(
                f"job {job.job} of lane {job.lane} has {job.rows} rows; "
                f"a lane takes 1 to {self._pace.lane_rows}"
            )
        queue = self._queues.get(job.layer)
        if queue is None:
            queue = self._queues[job.layer] = _Queue()
        queue.add(now, job)

    def withdraw(self, lane: int, jobs: Collection[int]) -> None:
        """Forgets jobs of a lane whose callers have left; those that are in a step already stay there."""
        for queue in self._queues.values():
            queue.keep([(at, job) for at, job in queue.jobs if job.lane != lane or job.job not in jobs])

    def take_numbers(self, steps: int) -> int:
        """Gives so many numbers in a row to steps that need no job; returns the first."""
        first, self.number = self.number, self.number + steps
        return first

    def clear(self) -> None:
        """Forgets every queued job: its door announces it again, or has failed it."""
        self._queues.clear()

    def next_step(self, epoch: int, now: float, layers: Collection[int] | None = None) -> Step | None:
        """Takes the most urgent layer's jobs into a step; None when nothing is queued. Jobs past their
        deadline are dropped: their callers have left. layers: which may be taken; None: any.
        """
        self._drop_expired(now)
        waiting = {
            layer: queue
            for layer, queue in self._queues.items()
            if queue.jobs and (layers is None or layer in layers)
        }
        if not waiting:
            return None
        layer = next(iter(waiting))
        if len(waiting) > 1:
            layer = min(waiting, key=lambda layer: min(map(self._urgency, waiting[layer].jobs)))
        lanes = self._fill(waiting[layer])
        if not waiting[layer].jobs:
            del self._queues[layer]  # a model has many layers, and few of them jobs
        return Step(self.take_numbers(1), epoch, layer, tuple(tuple(lane) for lane in lanes))

    def _urgency(self, entry: tuple[float, Announcement]) -> tuple[float, float]:
        """When a job is due, and when it came: one without a deadline does not wait behind all others."""
        at, job = entry
        return min(job.deadline, at + self._pace.due), at

    def _drop_expired(self, now: float) -> None:
        for queue in self._queues.values():
            if any(job.deadline <= now for _, job in queue.jobs):
                queue.keep([(at, job) for at, job in queue.jobs if job.deadline > now])

    def _fill(self, queue: _Queue) -> list[list[tuple[int, int]]]:
        """Jobs by lane, urgent ones first; what does not fit stays queued in its order."""
        lanes: list[list[tuple[int, int]]] = [[] for _ in range(self._max_lanes)]
        rows, taken = [0] * self._max_lanes, 0
        left: list[tuple[float, Announcement]] = []
        for at, job in sorted(queue.jobs, key=self._urgency):
            fits = (
                rows[job.lane] + job.rows <= self._pace.lane_rows and taken + job.rows <= self._pace.step_rows
            )
            if fits or not taken:
                lanes[job.lane].append((job.job, job.rows))
                rows[job.lane] += job.rows
                taken += job.rows
            else:
                left.append((at, job))
        queue.keep(sorted(left, key=lambda entry: entry[0]))
        return lanes
