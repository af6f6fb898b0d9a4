"""`StepsInFlight`: a group's steps, from jobs that gather to the last rank that has finished.

Like the `Sequencer` that it asks it has no thread, socket or clock of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.runtime.head.sequencer import Sequencer, StepPace
from moeserve.runtime.step import Announcement, Step

MOST = 2
"""Steps at the ranks: a header may wait there while the step before it runs."""


@dataclass(frozen=True)
class _Running:
    """A step that was sent to the ranks and that not all have finished."""

    layer: int
    started: float
    left: set[int]  # ranks that have not finished it


class StepsInFlight:
    """Jobs that wait, steps that run, and how many of both there were. Not thread-safe: its owner locks."""

    def __init__(self, ranks: int, pace: StepPace) -> None:
        self.steps = self.jobs = 0  # since the service began
        self._ranks = ranks
        self._sequencer = Sequencer(ranks, pace)
        self._running: dict[int, _Running] = {}  # by step number
        self._ended_at = 0.0  # the last step

    @property
    def queued(self) -> int:
        """Jobs that are in no step yet."""
        return self._sequencer.queued

    @property
    def running(self) -> int:
        """Steps that not all ranks have finished."""
        return len(self._running)

    def announce(self, job: Announcement, now: float) -> None:
        """Queues a job that a door has ready. Raises ValueError when it is over the lane's capacity."""
        self.jobs += 1
        self._sequencer.announce(job, now)

    def due(self, now: float) -> float | None:
        """When the next step may start; None: nothing waits, or as many steps run as may."""
        return self._sequencer.ready_at(now) if len(self._running) < MOST else None

    def start(self, epoch: int, now: float) -> Step | None:
        """The next step, which every rank has to be told of; None when the jobs that waited are too late."""
        step = self._sequencer.next_step(epoch, now)
        if step is not None:
            self.steps += 1
            self._running[step.number] = _Running(step.layer, now, set(range(self._ranks)))
        return step

    def finish(self, rank: int, number: int, now: float) -> tuple[int, float] | None:
        """Notes that a rank has finished a step; the last one gets its layer and the group's seconds."""
        step = self._running.get(number)
        if step is None:
            return None
        step.left.discard(rank)
        if step.left:
            return None
        del self._running[number]
        seconds = now - max(step.started, self._ended_at)
        self._ended_at = now
        return step.layer, seconds

    def clear(self) -> None:
        """Forgets every job and step: the group has ended, and doors have failed or announce again."""
        self._sequencer.clear()
        self._running.clear()
