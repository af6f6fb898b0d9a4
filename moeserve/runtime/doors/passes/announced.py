"""`AnnouncedLane`: one attached caller's memory, and the passes that are announced and told of in it."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from moeserve.proto import moe_pb2
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.futex import Words
from moeserve.proto.passes.mailbox import MailboxLayout, Status, fence
from moeserve.proto.texts import clipped
from moeserve.runtime.doors.passes.turns import Company
from moeserve.runtime.doors.payloads.region import Hold

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LaneMemory:
    """The two regions of a device lane, by name, and a hold on each."""

    mailbox: str
    answers: str
    held: tuple[Hold, Hold]
    layout: MailboxLayout
    quiet: Callable[[], bool]  # whether nobody else uses the answers: no step can write one any more


@dataclass(frozen=True)
class LaneModel:
    """What a rank serves, as far as a lane has to know it."""

    name: str
    hidden: int
    experts: int
    top_k: int
    layers: tuple[int, ...]


@dataclass
class Counts:
    """What a device lane has done."""

    passes: int = 0
    steps: int = 0
    ended: str = ""


@dataclass(frozen=True)
class LaneTerms:
    """What passes of a lane may ask for."""

    layers: frozenset[int]
    patience: float  # seconds for rows
    answer: float  # seconds for an answer
    observe: Callable[[str], None]  # is told how each pass ended, by a status's name
    counts: Counts = field(default_factory=Counts)
    ahead: float = 0.0  # seconds that a forward pass launched before its rows may wait for them; 0: none is


@dataclass(frozen=True)
class Announcement:
    """What a caller says of its next pass."""

    number: int
    layers: tuple[int, ...]
    stages: int
    standing: bool
    any_weights: bool
    version: int  # of the weights that its steps must have; 0: whichever comes first


@dataclass(frozen=True)
class Between:
    """A pass between two of its steps: none is under way."""

    said: Announcement
    steps: tuple[int, ...]  # of each stage, that were answered
    since: tuple[float, ...]  # by stage: when its next rows were first wanted
    version: int  # of the weights that its next step must have; 0: any


Handed = tuple[int, Between | None]
"""The number of the pass that was announced last, and the one that goes on, if any."""


Bell = tuple[Words, int, int]
"""Words of a mailbox, the place of one among them, and what it is."""


def _nobody(lane: AnnouncedLane) -> Company:
    return Company.NONE


class AnnouncedLane(ABC):
    """A caller's lane. `look` is called by one thread, `detach` by any."""

    def __init__(self, memory: LaneMemory, terms: LaneTerms) -> None:
        self.memory, self.counts = memory, terms.counts
        self.detached: str = ""  # why
        self.active_at = -math.inf  # when its caller last wanted a step
        # when there last was anything, or an answer that its caller goes on from
        self.stirred_at = time.monotonic()
        # who but a lane's caller wants the rank's steps now. It is given the lane and holds none: one that
        # leads to itself keeps its memory until the interpreter looks for such objects, which is seldom
        self.company_of: Callable[[AnnouncedLane], Company] = _nobody
        self._terms = terms
        box, answers = memory.held
        self._box = _words(box.memory)
        self._written = Words(self._box)
        self._out_words = Words(_words(answers.memory))
        self._out, self._text = _words(answers.memory), answers.memory[m.TEXT : m.TEXT + m.MOST_TEXT]
        self._out[m.TAKES] = m.TAKES_FILLED | m.TAKES_BUFFER
        self._last = 0  # the pass that was announced last

    @property
    def ahead(self) -> bool:
        """Whether its steps are launched ahead now, and may wait for its caller's rows on the device."""
        return False

    def company(self) -> Company:
        """Who else wants the rank's steps now."""
        return self.company_of(self)

    @property
    @abstractmethod
    def number(self) -> int:
        """Of the pass that runs; 0: none does."""

    @property
    def in_pass(self) -> bool:
        """Whether a pass runs."""
        return self.number != 0

    @property
    def soon(self) -> bool:
        """Whether its caller brings rows as soon as it has the answers that are on their way to it."""
        return False

    @property
    def rings(self) -> bool:
        """Whether its caller says when there is something to look at, and nobody else does."""
        return self._box[m.BELL] != 0

    def bell(self) -> Bell:
        """What its caller changes then, as it is now."""
        return self._written, m.BELL, self._box[m.BELL]

    @property
    def rung(self) -> int:
        """What that is now."""
        return self._box[m.BELL]

    @property
    def unseen(self) -> bool:
        """Whether its caller, who rings, may have said something that no look has seen."""
        return False

    @property
    def silent(self) -> bool:
        """Whether nothing is to be looked at before its caller rings."""
        return self.rings and not self.unseen and not self.ahead

    def stirs(self, now: float) -> bool:
        """Whether there may be something to look at."""
        return True

    def pause(self, now: float) -> float:
        """Seconds for which its caller's words need no look; infinite: until one of its steps ends."""
        return (now - self.stirred_at) / 8

    @property
    def under_way(self) -> int:
        """Steps that were begun when their rows were there, and have not ended."""
        return 0

    @property
    def announced(self) -> bool:
        """Whether its caller has announced a pass that was not looked at."""
        return bool(self._box[m.ANNOUNCED] != self._last)

    @property
    def nbytes(self) -> int:
        """Of its memory."""
        return self.memory.layout.mailbox_bytes + self.memory.layout.answers_bytes

    @property
    def wire(self) -> str:
        """In which its rows come; empty: as they are."""
        return ""

    @property
    def rows(self) -> int:
        """The most of a step."""
        return self.memory.layout.rows

    @abstractmethod
    def detach(self, why: str) -> None:
        """Ends the pass that runs, and begins no other. Steps under way are given up."""

    @abstractmethod
    def yield_steps(self, company: Company) -> None:
        """Others want steps: what waits for this caller's rows waits no more."""

    @abstractmethod
    def look(self, now: float) -> bool:
        """Does what the caller's words ask for; whether there was anything."""

    def _filled(self, stage: int) -> bool:
        """Whether all rows of a stage are there whose tag is: their caller may fill them behind it."""
        head = self.memory.layout.header(stage)
        filled = self._box[head + m.FILLED]
        return bool(filled == 0 or filled > self._box[head + m.COUNT])

    def _announced(self) -> Announcement | None:
        """The pass that has been announced since the last look; a wrong one is refused. `_last` is its
        number.
        """
        number = self._box[m.ANNOUNCED]
        if number == self._last:
            return None
        fence()
        self._last = number
        box = self._box
        steps, stages, flags = box[m.STEPS], box[m.STAGES], box[m.FLAGS]
        layers = tuple(box[m.LAYERS : m.LAYERS + min(steps, m.MOST_LAYERS)])
        if wrong := "; ".join(self._wrong((number, steps, stages, flags), layers)):
            self._tell(number, Status.REFUSED, f"bad_pass: {wrong}")
            return None
        modes = bool(flags & m.STANDING), bool(flags & m.ANY_WEIGHTS)
        return Announcement(number, layers, stages, *modes, box[m.WANTED_VERSION])

    def _wrong(self, said: tuple[int, int, int, int], layers: tuple[int, ...]) -> Iterator[str]:
        """What is wrong with an announcement."""
        number, steps, stages, flags = said
        most = self.memory.layout.stages
        if not 0 < number <= m.LAST_NUMBER:
            yield f"number {number} is not one of 1 to {m.LAST_NUMBER}"
        if not 0 < steps <= m.MOST_LAYERS:
            yield f"{steps} layers; a pass has 1 to {m.MOST_LAYERS}"
        if flags & ~(m.STANDING | m.ANY_WEIGHTS):
            yield f"flags {flags} are unknown"
        if not 0 < stages <= most:
            yield f"{stages} stages; this lane was attached with {most}"
        if unknown := [layer for layer in layers if layer not in self._terms.layers]:
            yield f"layer {unknown[0]} has no experts served here"

    def _tell(self, number: int, status: Status, text: str) -> None:
        self.counts.passes += 1
        self.counts.ended = status.name.lower()
        self._terms.observe(self.counts.ended)
        if status is not Status.OK:
            log.info("a pass ends with %s: %s", status.name, text, extra={"sort": f"pass {status.name}"})
        data = clipped(text).encode()[: m.MOST_TEXT]
        self._text[: len(data)] = data
        self._out[m.STATUS], self._out[m.TEXT_BYTES] = int(status), len(data)
        fence()
        self._out_words.write(m.ENDED, number)
        for stage in range(self.memory.layout.stages):
            self._out_words.wake(self.memory.layout.answer_header(stage) + m.TAG)

    def close(self) -> None:
        """Lets go of its memory; no pass runs any more."""
        for held in self.memory.held:
            held.close()


class HandedLane(AnnouncedLane):
    """A lane that lets go of a pass between two steps, or goes on with another lane's on the same memory."""

    @abstractmethod
    def hand_over(self) -> Handed | None:
        """Lets go of a pass that runs, which goes on elsewhere; None where a step of it is under way."""

    def take_over(self, handed: Handed) -> None:
        """Goes on with what another has let go of."""
        self._last, between = handed
        if between is not None:
            self._goes_on(between)

    @abstractmethod
    def _goes_on(self, between: Between) -> None:
        """Has this pass run from here on."""


def lane_info(name: str, device: str, lane: AnnouncedLane) -> moe_pb2.DeviceLaneInfo:
    """What is listed of an attached lane; device: as its caller describes it."""
    return moe_pb2.DeviceLaneInfo(
        name=name,
        device=device,
        rows=lane.rows,
        stages=lane.memory.layout.stages,
        bytes=lane.nbytes,
        in_pass=lane.in_pass,
        passes=lane.counts.passes,
        steps=lane.counts.steps,
        ended=lane.counts.ended,
        rows_wire=lane.wire,
    )


def _words(memory: memoryview) -> memoryview:
    """The same bytes as words of 64 bits, each read and written at once."""
    return memory.cast("B").cast("Q")
