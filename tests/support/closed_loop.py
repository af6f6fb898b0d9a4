"""Callers in a closed loop over `StepsInFlight`, as discrete events: no thread, no clock, no chance.

Each caller announces one job, waits until a step has answered it, thinks, and announces the next. The
group is one device that computes steps one after the other, and a host that launches them.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from moeserve.dispatch.members import Members
from moeserve.runtime.ordering.in_flight import StepsInFlight
from moeserve.runtime.ordering.sequencer import StepPace
from moeserve.runtime.step import Announcement, Step

MEMBERS = Members.of_ranks(1)


@dataclass(frozen=True)
class World:
    """Seconds that everything beside the sequencer's decisions takes."""

    base: float = 300e-6  # a step on the device, without rows
    row: float = 1e-6  # and for each of its rows
    header: float = 60e-6  # from the head to the members
    launch: float = 50e-6  # by the host of a member, one step at a time
    done: float = 60e-6  # from a member to the head, as word that a step has ended, or of a job
    reply: float = 10e-6  # each caller's answer, one after the other
    think: tuple[float, float] = (50e-6, 500e-6)  # from an answer to the next announcement, evenly spread
    noise: float = 0.0  # a step takes up to so much longer, as a share of it; one of a hundred ten times that
    first: float = 0.0  # seconds that each of the first three steps takes beyond

    def step(self, rows: float) -> float:
        """Seconds of a step on the device."""
        return self.base + self.row * rows

    @property
    def trips(self) -> float:
        """What a step takes beyond its own time where none is under way before it."""
        return self.header + self.launch + self.done

    def ideal(self, callers: int, rows: int) -> float:
        """Jobs a second where callers go in one group, or in two whose steps take turns: the better one."""
        best = 0.0
        for groups in (1, 2):
            size = callers / groups
            away = self.trips + self.done + self.think[1] + self.reply * size
            step = self.step(size * rows)
            best = max(best, callers / max(groups * step, step + away, callers * self.reply))
        return best


@dataclass
class Run:
    """What a run gave."""

    latencies: list[float] = field(default_factory=list)  # from an announcement to the answer
    steps: list[int] = field(default_factory=list)  # jobs of each
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Jobs a second."""
        return len(self.latencies) / self.seconds

    def p(self, percent: float) -> float:
        """A percentile of the latencies."""
        return sorted(self.latencies)[min(len(self.latencies) - 1, int(percent / 100 * len(self.latencies)))]


class ClosedLoop:
    """Runs `callers` of `rows` rows for `seconds` of its own time; `layers` in turn, by each caller."""

    def __init__(
        self, world: World, callers: int, rows: int, pace: StepPace, layers: int = 1, *, spread: bool = False
    ) -> None:
        self.world, self._rows, self._callers, self._layers = world, rows, callers, layers
        self._spread = spread  # callers begin at any layer
        self._steps = StepsInFlight(1, pace)
        self._random = random.Random(callers * 1000 + rows)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()
        self._jobs: dict[int, tuple[float, int]] = {}  # announced, layer
        self._launcher_free = self._device_free = self._answers_free = 0.0
        self._slow = 3  # steps
        self._leaving = 0  # callers
        self._delays_at = math.inf
        self._late_word: int | None = None  # the number of the step that it is about
        self._wake = math.inf
        self.now = 0.0
        self.made = Run()

    def run(self, seconds: float, warm_up: float = 0.2) -> Run:
        """Runs it; what happened in the first `warm_up` seconds does not count."""
        for _ in range(self._callers):
            first = self._random.randrange(self._layers) if self._spread else 0
            self._at(self._thinks(), lambda at=first: self._announce(at))  # type: ignore[misc]
        counted = False
        while self._events and self._events[0][0] < warm_up + seconds:
            self.now, _, act = heapq.heappop(self._events)
            if not counted and self.now >= warm_up:
                self.made, counted = Run(), True
            act()
        self.made.seconds = seconds
        return self.made

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._ids), act))

    def _thinks(self) -> float:
        low, high = self.world.think
        return low + (high - low) * self._random.random()

    def _late(self) -> float:
        share = self.world.noise * self._random.random() if self.world.noise else 0.0
        return share * 10 if share and self._random.random() < 0.01 else share

    def leaves(self, when: float, callers: int) -> None:
        """Has so many callers leave, each after its next answer."""
        self._at(when, lambda: setattr(self, "_leaving", callers))

    def delays(self, when: float) -> None:
        """Has the word that a step has ended come late once, together with the next one's."""
        self._delays_at = when

    def joins(self, when: float, callers: int) -> None:
        """Has so many callers more begin."""
        for _ in range(callers):
            self._at(when + self._thinks(), lambda: self._announce(0))

    def _announce(self, layer: int) -> None:
        number = next(self._ids)
        self._jobs[number] = self.now, layer
        self._steps.announce(Announcement(0, number, layer, self._rows, math.inf), self.now)
        self._emit()

    def _emit(self) -> None:
        while (due := self._steps.due(self.now)) is not None:
            if due > self.now:
                if not self.now < self._wake <= due:
                    self._wake = due
                    self._at(due, self._woken)
                return
            step = self._steps.start(1, self.now, MEMBERS)
            if step is not None:
                self.made.steps.append(len(step.jobs[0]))
                self._at(self.now + self.world.header, lambda step=step: self._launch(step))  # type: ignore[misc]

    def _woken(self) -> None:
        self._wake = math.inf
        self._emit()

    def _launch(self, step: Step) -> None:
        world = self.world
        self._launcher_free = max(self.now, self._launcher_free) + world.launch
        took = world.step(sum(step.lane_rows)) * (1 + self._late()) + (self._slow > 0) * world.first
        self._slow -= 1
        self._device_free = max(self._device_free, self._launcher_free) + took
        self._at(self._device_free, lambda: self._ended(step))

    def _ended(self, step: Step) -> None:
        for number, _ in step.jobs[0]:
            announced, layer = self._jobs.pop(number)
            answered = self._answers_free = max(self._answers_free, self.now) + self.world.reply
            self.made.latencies.append(answered - announced)
            if self._leaving:
                self._leaving -= 1
                continue
            following, back = (layer + 1) % self._layers, answered + self._thinks() + self.world.done
            self._at(back, lambda at=following: self._announce(at))  # type: ignore[misc]
        told = self.now + self.world.done
        if self._late_word is not None:
            late, self._late_word = self._late_word, None
            self._at(told - 5e-6, lambda: self._done(late))
        elif self.now >= self._delays_at:
            self._delays_at, self._late_word = math.inf, step.number
            return
        self._at(told, lambda: self._done(step.number))

    def _done(self, number: int) -> None:
        self._steps.finish(0, number, self.now)
        self._emit()
