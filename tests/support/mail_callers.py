"""A lane of a caller's GPU beside runs that end by hand, and the caller's words."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from lane_words import LaneWords

from moeserve.dispatch.mail.kernels import CHOICE, words
from moeserve.dispatch.mail.layout import MailLayout
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import MailboxLayout, tag_of
from moeserve.runtime.doors.passes.announced import LaneTerms
from moeserve.runtime.doors.passes.mail_lane import MailLane
from moeserve.runtime.doors.payloads import Regions
from moeserve.runtime.rank.runs.mail import Mail
from moeserve.runtime.rank.runs.runs import OwnerLane, Run, Told

WORDS_ALONE = MailboxLayout.of((1, 2), (8, 4, 2), "bf16")
LAYOUT = MailLayout(40, 2, 8, 4, 2, torch.bfloat16)
PATIENCE = 5.0
AHEAD = 2.0  # seconds; a test may be slow


class Memory:
    """Device memory that is none."""

    closed = False

    def handle(self) -> bytes:
        return bytes(64)

    def close(self) -> None:
        self.closed = True


@dataclass
class Caller(LaneWords):
    """A lane with the caller's words; runs are begun into `begun`."""

    regions: Regions
    begun: list[tuple[Run, int]] = field(default_factory=list)
    detached: list[Mail] = field(default_factory=list)
    observed: list[str] = field(default_factory=list)
    most_rows: int = 64
    most_seconds: float = math.inf
    loaded: bool = True  # what steps need
    alone: bool = True  # no other member has to agree
    graphs: bool = True  # whether steps are recorded
    retired: int = 0  # lanes whose memory is to be freed
    makes_room: bool = False  # others' runs are under way meanwhile
    most_steps: int = 4096  # of a run that is recorded
    ahead: float = AHEAD
    short_rows: int = 0  # of steps that have a track of their own

    def __post_init__(self) -> None:
        memory = self.memory_of(self.regions, WORDS_ALONE)
        terms = LaneTerms(frozenset({3, 5}), PATIENCE, 9.0, self.observed.append, ahead=self.ahead)
        abort = torch.zeros(1, dtype=torch.int32)
        owner = OwnerLane(LAYOUT, (0, 0), abort, PATIENCE, words(torch.device("cpu")))
        self.mail = Mail(owner, Memory())  # type: ignore[arg-type]
        self.lane: MailLane = MailLane(memory, terms, (LAYOUT, self.mail), self)  # type: ignore[arg-type]

    # -- as the member's runs

    def begin(self, run: Run, of: object, version: int) -> None:
        self.begun.append((run, version))

    def leads(self, run: Run) -> bool:
        return self.loaded

    def recorded(self, run: Run) -> bool:
        return self.graphs

    def short(self, rows: int) -> bool:
        return rows <= self.short_rows

    def detach(self, mail: Mail) -> None:
        self.detached.append(mail)

    # -- as a caller

    def look(self, later: float = 0.0) -> bool:
        """Looks. Where there is something to do, the lane stirs, unless a while has to pass for it."""
        now = time.monotonic() + later
        stirs = self.lane.stirs(now)
        found = self.lane.look(now)
        assert stirs or not found, "a look would not have come"
        return found

    def standing(self, layers: list[int], stages: int = 1, version: int = 0, flags: int = 0) -> None:
        self.announce(layers, stages, m.STANDING | flags, version)

    def bring(self, stage: int, step: int, count: int = 2, kind: int = CHOICE) -> None:
        head = WORDS_ALONE.header(stage)
        for at, value in ((m.COUNT, count), (m.KIND, kind), (m.TAG, tag_of(self.number, step))):
            self.box[head + at] = value

    def steady(self, counts: tuple[int, ...] = (5,)) -> int:
        """Two forward passes, one right after the other, and a third that is launched; how many steps it has
        brought then.
        """
        for step in (0, 2, 4):
            for stage, count in enumerate(counts):
                self.bring(stage, step, count)
            assert self.look()
            if step < 4:
                self.lane.ran(Told(0, (step + 2,) * len(counts), 2 * len(counts)), 1)
            for stage, count in enumerate(counts):
                self.bring(stage, step + 1, count)
        return 6

    @property
    def aborted(self) -> bool:
        return bool(self.mail.lane.abort[0])
