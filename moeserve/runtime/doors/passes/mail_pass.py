"""`MailPass`: how far a pass of a caller's GPU has come, as an owner's host knows it, and `PassLane`."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field

from moeserve.dispatch.mail.kernels import CHOICE
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import Status, tag_of
from moeserve.runtime.doors.passes.announced import (
    Announcement,
    Between,
    HandedLane,
    LaneMemory,
    LaneTerms,
)
from moeserve.runtime.doors.passes.turns import Company
from moeserve.runtime.rank.runs.runs import Told

AHEAD_STEPS = 512
"""Of one run: to record it takes the thread of the steps a millisecond for each, and no other step runs."""

MISSED_STEPS = 8
"""Of a caller that are launched when their rows are there, after one that was launched in its turn had to be
left: its kernels compute nothing, but others wait for them.
"""

MOST_FLYING, MOST_IN_TURNS = 2, 3
"""Runs of one lane that were launched and have not ended, and where others' lie between them; one, as long as
nobody knows the weights of a pass whose steps must have the same.
"""

EARLY_TURNS = 2
"""Steps of a lane that are launched in their turn before their rows are there: so many rounds of all callers
may this host be late, which has a launch to make for each of their steps.
"""


@dataclass
class UnderWay:
    """A run that was launched and has not ended."""

    turn: int  # as `Turns` counts them
    early: dict[int, int] | None  # by stage, steps before it: not all of its rows are there
    in_turn: bool  # one step, launched in its turn before its rows were there
    beside: bool = False  # it leaves the other track what that needs

    @property
    def waits_in_turn(self) -> bool:
        return self.in_turn and self.early is not None


@dataclass
class MailPass:
    """A pass of a lane of a GPU, and what of it was launched."""

    said: Announcement
    sent: list[int]  # steps of each stage that were launched
    since: float  # when its next rows were first wanted
    version: int
    under_way: list[UnderWay] = field(default_factory=list)  # in their order
    waited: float = 0.0  # since when the first of them has been the next one
    begun: bool = False  # whether any was launched
    waits: bool = False  # whether one of them was launched before all of its rows were there
    slow: bool = False  # a run of this forward pass was left since it waited too long
    told: tuple[int, ...] | None = None  # steps of each stage that were answered, fewer than were launched
    misfits: int = 0  # runs in a row that were left where the one before was
    fitted: list[int] = field(default_factory=list)  # steps of each stage when a run was left last
    again: bool = False  # the next run begins where one had to stop
    ends: tuple[Status, str] | None = None
    answered: float = -math.inf  # when a run ended last that gave answers
    steady: bool = False  # its caller brings the rows of the next forward pass soon, as it did before
    missed: int = 0  # steps that are launched when their rows are there, since one was left in its turn

    @classmethod
    def of(cls, between: Between) -> MailPass:
        """One that goes on; its next run begins with the steps that it has."""
        return cls(between.said, list(between.steps), max(between.since), between.version)

    def between(self) -> Between:
        """How far it is; no run is under way."""
        steps = tuple(self.told or self.sent)
        return Between(self.said, steps, (self.since,) * len(steps), self.demanded)

    def layer(self, stage: int) -> int:
        return self.said.layers[self.sent[stage] % len(self.said.layers)]

    def wants(self, stage: int) -> bool:
        return self.said.standing or self.sent[stage] < len(self.said.layers)

    @property
    def before(self) -> tuple[int, ...]:
        """Steps of each stage before the first run; () for none, and once that is launched."""
        return () if self.begun or not any(self.sent) else tuple(self.sent)

    @property
    def demanded(self) -> int:
        """The version of the weights that its next run must have; 0: any."""
        return self.said.version if self.said.any_weights else self.version

    @property
    def flying(self) -> int:
        """Runs that have not ended."""
        return len(self.under_way)

    def full(self, company: Company) -> bool:
        """Whether no run may be launched before one has ended; company: who else wants steps."""
        most = MOST_IN_TURNS if company is Company.LANES else MOST_FLYING
        return self.flying >= (most if self.said.any_weights or self.version else 1)

    @property
    def awaited(self) -> list[UnderWay]:
        """Runs that were launched before their rows were there, which were not seen to have come."""
        return [one for one in self.under_way if one.early is not None]

    @property
    def takes_turns(self) -> bool:
        """Whether a further step may be launched in its turn before its rows are there."""
        awaited = self.awaited
        return not self.missed and len(awaited) < EARLY_TURNS and all(one.in_turn for one in awaited)

    def ran(self, *, misfit: bool) -> None:
        """The first of its runs has ended."""
        if self.under_way.pop(0).in_turn:
            self.missed = MISSED_STEPS if misfit else 0

    @property
    def alike(self) -> bool:
        """Whether all stages are at the same step."""
        return len(set(self.sent)) == 1

    @property
    def resting(self) -> bool:
        """Whether it is between two forward passes, or before the first."""
        return all(steps % len(self.said.layers) == 0 for steps in self.sent)

    def may_rest(self, now: float) -> bool:
        """Whether no rows are late: steps are under way, or a standing pass is between two forward passes."""
        rests = self.flying > 0 or (self.said.standing and self.resting)
        if rests:
            self.since = now
        return rests

    def look_for_late(self, now: float, patience: float) -> None:
        """Ends it where its caller is late."""
        if not self.may_rest(now) and now - self.since > patience:
            key = f"passes.patience_seconds = {patience:g}"
            stage = min(range(len(self.sent)), key=self.sent.__getitem__)
            text = f"late: stage {stage} brought no rows of layer {self.layer(stage)} within {key}"
            self.ends = self.ends or (Status.LATE, text)

    @property
    def done(self) -> bool:
        return not self.said.standing and all(steps == len(self.said.layers) for steps in self.sent)

    @property
    def waiting_turn(self) -> int:
        """Of the first step that was launched in its turn and waits for its rows; 0: there is none."""
        return next((one.turn for one in self.under_way if one.waits_in_turn), 0)

    @property
    def beside(self) -> bool:
        """Whether that one leaves the other track what it needs."""
        return next((one.beside for one in self.under_way if one.waits_in_turn), False)

    @property
    def all_beside(self) -> bool:
        """Whether all that was launched leaves the other track what it needs."""
        return all(one.beside for one in self.under_way)

    @property
    def ready_beside(self) -> bool:
        """Whether the last run under way that does not wait leaves room; so does one that is yet to come."""
        return next((one.beside for one in reversed(self.under_way) if not one.waits_in_turn), True)

    @property
    def ready_turn(self) -> int:
        """Of the last run under way that does not wait in its turn; 0: there is none."""
        return max((one.turn for one in self.under_way if not one.waits_in_turn), default=0)

    @property
    def _deep(self) -> int:
        """Layers of a run at most."""
        return max(1, AHEAD_STEPS // len(self.sent))

    @property
    def whole(self) -> int:
        """Steps of a run with which a forward pass begins."""
        return min(len(self.said.layers), self._deep) * len(self.sent)

    @property
    def cut(self) -> bool:
        """Whether its next step is one with which no run of a whole forward pass begins: one was left within
        it. To record what is left takes longer than to launch that step by step.
        """
        return self.sent[0] % len(self.said.layers) % self._deep != 0

    def ahead(self) -> tuple[tuple[int, int], ...]:
        """The steps that are left of this forward pass, layer by layer; a long one has several runs."""
        layers, at = self.said.layers, self.sent[0] % len(self.said.layers)
        last = at + self._deep
        return tuple((layer, stage) for layer in layers[at:last] for stage in range(len(self.sent)))


class PassLane(HandedLane):
    """A lane with such a pass: what of its next rows is there, and what `Turns` asks of it."""

    def __init__(self, memory: LaneMemory, terms: LaneTerms) -> None:
        super().__init__(memory, terms)
        self.short = False  # its steps are on the track of those of few rows, as of the last one
        self._pass: MailPass | None = None
        self._lock = threading.Lock()

    @property
    def waiting_turn(self) -> int:
        """Of a step that was launched in its turn and waits for its rows; 0: there is none."""
        with self._lock:
            return 0 if self._pass is None else self._pass.waiting_turn

    @property
    def beside(self) -> bool:
        """Whether that one leaves the other track what it needs."""
        with self._lock:
            return self._pass is not None and self._pass.beside

    @property
    def ready_beside(self) -> bool:
        """Whether its last run whose rows are there leaves the other track what it needs."""
        with self._lock:
            return self._pass is None or self._pass.ready_beside

    @property
    def ready_turn(self) -> float:
        """Of its last run whose rows are there; infinite: it is not launched yet. 0: there is none."""
        with self._lock:
            run = self._pass
            if run is None or run.ends is not None:
                return 0
            return math.inf if self._there(run) else run.ready_turn

    def _header(self, stage: int) -> tuple[int, int]:
        """Rows and kind of a stage's step, as the caller says to this host; the device asks for itself."""
        head = self.memory.layout.header(stage)
        return self._box[head + m.COUNT], min(self._box[head + m.KIND], CHOICE + 1)

    def _there(self, run: MailPass) -> list[int]:
        """The stages whose next rows have come."""
        return [stage for stage in range(len(run.sent)) if run.wants(stage) and self._has_tag(run, stage)]

    def _has_tag(self, run: MailPass, stage: int) -> bool:
        tag = self._box[self.memory.layout.header(stage) + m.TAG]
        return bool(tag == tag_of(run.said.number, run.sent[stage]))


def told_end(told: Told, patience: float) -> tuple[Status, str]:
    """How a pass has ended that a kernel has ended; patience: seconds for rows."""
    match told.ended:
        case Status.LATE:
            return (
                Status.LATE,
                f"late: rows of a step did not come within passes.patience_seconds = {patience:g}",
            )
        case Status.REFUSED:
            text = "a header's layer, kind or rows are not the next step's, or an id is out of range"
            return Status.REFUSED, f"bad_step: {text}"
        case _:
            return Status.LOST, "lost: its waits were ended"
