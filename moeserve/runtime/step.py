"""What time is made of: `Job` (one call's rows on one lane), `Announcement` of it, `Step` (one layer, run by
the members that take part).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from moeserve.dispatch.members import Member, Members

FIRST_NUMBER = 1 << 20
"""The number of a service's first step. The steps that a rank runs by itself before it serves are numbered
from 1 and stay below, so that the numbers of its dispatchers only rise.
"""


@dataclass(frozen=True)
class Announcement:
    """What the sequencer knows of a job: a few bytes."""

    lane: int
    job: int  # numbered by the door
    layer: int
    rows: int
    deadline: float  # seconds on its reader's clock; inf for none
    generation: int = 0  # in which the lane takes part, as it knows
    gathered: bool = False  # of all callers who were there: the step need not wait for more


@dataclass(frozen=True)
class Step:
    """One layer run at once by the members that take part. `jobs[l]` are lane l's (job, rows); a lane without
    any is not named by the step.

    Row counts are binding: a job cancelled after sequencing still takes its rows, its ids EMPTY.
    """

    number: int
    epoch: int
    layer: int
    jobs: tuple[tuple[tuple[int, int], ...], ...]  # by lane, reserved ones too

    @cached_property
    def lane_rows(self) -> tuple[int, ...]:
        """The rows that each lane brings, by lane."""
        return tuple(sum(rows for _, rows in lane) for lane in self.jobs)

    def seats(self, members: Members) -> tuple[int, ...]:
        """The seats that take part, ascending: every owner's, and those whose lanes bring rows."""
        return members.in_step(self.lane_rows)

    def header(self, member: Member) -> Header:
        """The part of the step that `member` is sent; without a lane it has no jobs."""
        jobs = () if member.lane is None else self.jobs[member.lane]
        return Header(self.number, self.epoch, self.layer, self.lane_rows, jobs)


@dataclass(frozen=True)
class Header:
    """A step as one member sees it: its own jobs, and how many rows every lane brings."""

    number: int
    epoch: int
    layer: int
    lane_rows: tuple[int, ...]  # by lane, reserved ones too
    jobs: tuple[tuple[int, int], ...]  # (job, rows)


class Stamp(NamedTuple):
    """The epoch and the weights under which an answer was computed."""

    epoch: int
    weights_version: int


NOT_YET = Stamp(0, 0)


class CallerMemory:
    """Memory that a caller lent to its call. It is given back when the call has ended and no copy by the
    device's own engines (DMA), and no step on a CPU, can touch it any more. Safe from any thread.

    close: gives it back; called once, by whoever was the last to use it.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._users = 1  # the call itself, which `done` ends
        self._lock = threading.Lock()

    def use(self) -> bool:
        """Notes one user more, who calls `done` later; False where the memory was given back already."""
        with self._lock:
            self._users += self._users > 0
            return self._users > 0

    @property
    def idle(self) -> bool:
        """Whether nobody uses it but the call, if that has not ended."""
        return self._users <= 1

    def done(self) -> None:
        """One user less."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            close, self._close = self._close, _given_back  # which may hold this
            close()


def _given_back() -> None:
    """Does nothing: the memory was given back."""


@dataclass(frozen=True, eq=False)
class Lent:
    """What a device may read and write of the memory that a caller lent.

    On a GPU only memory that is registered with it counts: its engines copy from and to it, beside the host.
    On a CPU only memory that nobody can make smaller.
    """

    memory: CallerMemory
    rows: bool = False  # the hidden states lie in such memory
    home: Tensor | None = None  # [T, H] of the caller's dtype, in such memory: where the answer is wanted
    whole: bool = True  # it is the call's, not that of one of its parts

    def part(self, rows: slice) -> Lent:
        """The same for some of the rows."""
        return Lent(self.memory, self.rows, None if self.home is None else self.home[rows], whole=False)


class Moment(Protocol):
    """A moment in the work of a device's stream."""

    def synchronize(self) -> None:
        """Waits for it, without holding the interpreter."""

    def query(self) -> bool:
        """Whether it has passed."""


class Upload:
    """A job's hidden states on the device, or on their way there.

    One of two owns it: the step that takes the job, or whoever ends the job without a step. `claim` says who.
    """

    def __init__(self, rows: Tensor, event: Moment, release: Callable[[], None]) -> None:
        self.rows, self.event = rows, event
        self._release: Callable[[], None] | None = release
        self._claimed = False
        self._lock = threading.Lock()

    def claim(self) -> bool:
        """Whether the caller of this owns it from now on; only the first does."""
        with self._lock:
            first, self._claimed = not self._claimed, True
        return first

    @property
    def claimed(self) -> bool:
        """Whether somebody owns it."""
        return self._claimed

    def release(self) -> None:
        """The copy has ended: the caller's memory is used no more. A second call does nothing."""
        with self._lock:
            release, self._release = self._release, None
        if release is not None:
            release()


class Segment(NamedTuple):
    """One caller's rows `[T, H]` of a job of several, from its row `at` on, and their answer's place."""

    at: int
    hidden: Tensor
    home: Tensor


class Routed(NamedTuple):
    """Router logits `[T, E]`, and the version of the weights whose correction bias chose experts by them."""

    logits: Tensor
    version: int


class Several(Protocol):
    """Callers whose rows are one job."""

    gathered: bool  # whether they are all who were there, and others come with the next one

    @property
    def callers(self) -> int:
        """How many there were."""

    @property
    def segments(self) -> Sequence[Segment]:
        """Of those who are still there, in their order."""


@dataclass(eq=False)
class Job:
    """One call's rows on one lane, from the door until its answer; or those of several callers. Forward is
    pure, so a job can be run again.
    """

    number: int
    layer: int
    hidden: Tensor  # [T, H]; of several callers, whose rows lie apart, a meta tensor
    experts: Tensor  # [T, K] int32
    weights: Tensor  # [T, K] float32
    deadline: float  # time.monotonic() seconds; inf for none
    ended: Callable[[Job], None]  # called by the thread that ends it; after `disown` nobody hears of it
    weights_version: int = 0  # the one it must be computed with; 0: whichever is served
    lent: Lent | None = None  # what a device may touch of the caller's memory
    several: Several | None = None  # whose rows it has, where callers can leave by themselves
    upload: Upload | None = None  # its hidden states, where they were sent to the device ahead of its step
    routed: Routed | None = None  # its logits, where a correction bias took part in choosing its experts
    created: float = field(default_factory=time.monotonic)
    output: Tensor | None = None  # [T, H]
    stamp: Stamp = NOT_YET
    error: Exception | None = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Where the rows lie, of callers whose rows lie apart; else none."""
        several = self.several
        return tuple(several.segments) if several is not None and self.hidden.is_meta else ()

    @property
    def callers(self) -> int:
        """Whose rows it has."""
        several = self.several
        return 1 if several is None else several.callers

    @property
    def over(self) -> bool:
        """Whether it was answered or has failed."""
        return self.output is not None or self.error is not None

    def finish(self, output: Tensor, stamp: Stamp) -> None:
        """Ends the job with its answer `[T, H]`."""
        self.output, self.stamp = output, stamp
        self.ended(self)

    def fail(self, error: Exception) -> None:
        """Ends the job with a failure."""
        self.error = error
        self.ended(self)

    def disown(self) -> None:
        """Lets go of the call that the job is a part of, whose answer or failure is there."""
        self.ended = _nobody


def _nobody(job: Job) -> None:
    """Hears that a job ended whose call has ended already."""


@dataclass(frozen=True)
class Phases:
    """One step's seconds, rows and bytes on one member.

    On a GPU the seconds are those of the launches, until `measured` replaces them by the device's own.
    """

    dispatch: float
    compute: float
    combine: float
    expert_rows: int  # (token, expert) rows this rank computed; -1 where only the device knows
    dispatched_bytes: int  # sent to other ranks
    combined_bytes: int
    dispatcher: str  # that carried it
    timed: bool = True  # whether the seconds say how long the step took
    on_device: Callable[[], list[float]] | None = None  # gives the device's seconds, once the step has ended

    def measured(self) -> Phases:
        """The same with the seconds that the device took; to be asked when the step has ended."""
        if self.on_device is None:
            return self
        dispatch, compute, combine = self.on_device()
        return replace(self, dispatch=dispatch, compute=compute, combine=combine, timed=True, on_device=None)


@dataclass(frozen=True)
class StepRecord:
    """What one rank saw of one step; the exporter reads it."""

    number: int
    layer: int
    jobs: int  # counted by caller
    lane_rows: int  # rows this lane brought
    wait: float  # seconds from its earliest job's arrival at the door to the step's start
    phases: Phases
    late: tuple[int, ...] = ()  # seats whose rows it went without
    launch: float = 0.0  # seconds of the host from the step's start until it was launched
    reply: float = 0.0  # seconds of the host from the step's end until all its callers were answered


@dataclass(frozen=True, eq=False)
class _Columns:
    """Rows as tensors that have one entry a row each, in the order of the fields."""

    hidden: Tensor  # [T, H]

    def columns(self) -> tuple[Tensor, ...]:
        """The tensors, in the order of the fields."""
        return tuple(vars(self).values())

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Rows of the same kind, each column changed."""
        return replace(self, **{name: change(column) for name, column in vars(self).items()})

    def rows(self, index: slice) -> Self:
        """The rows that `index` picks."""
        return self.each(lambda column: column[index])

    def to(self, device: str) -> Self:
        """These rows with every column on `device`."""
        return self.each(lambda column: column.to(device))


@dataclass(frozen=True, eq=False)
class LaneLogits(_Columns):
    """One lane's rows of a step that the layer's gate has yet to route; which rows are real."""

    logits: Tensor  # [T, E]
    valid: Tensor  # [T] bool


@dataclass(frozen=True, eq=False)
class LaneInput(_Columns):
    """One lane's rows of a step: `hidden [T, H]`, `experts [T, K]`, `weights [T, K]`, and which rows are
    real.
    """

    experts: Tensor
    weights: Tensor
    valid: Tensor  # [T] bool

    @classmethod
    def gather(cls, header: Header, jobs: list[Job | None], empty: LaneInput) -> LaneInput:
        """The rows of a header's jobs in its order; a job without a caller gives rows that are not valid."""
        parts = [_part(job, rows, empty) for (_, rows), job in zip(header.jobs, jobs, strict=True)] or [empty]
        return (
            parts[0]
            if len(parts) == 1
            else cls(*(torch.cat(column) for column in zip(*map(cls.columns, parts), strict=True)))
        )


LaneRows = LaneInput | LaneLogits
"""What a lane brings to a step."""


@cache
def empty_input(hidden: int, top_k: int, dtype: torch.dtype) -> LaneInput:
    """No rows, of the right widths."""
    return LaneInput(
        torch.zeros(0, hidden, dtype=dtype),
        torch.zeros(0, top_k, dtype=torch.int32),
        torch.zeros(0, top_k),
        torch.zeros(0, dtype=torch.bool),
    )


def joined_rows(job: Job) -> Tensor:
    """The hidden states `[T, H]` of a job, on the host; zeros of callers who have left."""
    if not job.hidden.is_meta:
        return job.hidden
    segments = job.segments
    if sum(rows.shape[0] for _, rows, _ in segments) == job.hidden.shape[0]:
        return torch.cat([rows for _, rows, _ in segments])
    found = torch.zeros(job.hidden.shape, dtype=job.hidden.dtype)
    for at, rows, _ in segments:
        found[at : at + rows.shape[0]] = rows
    return found


def _part(job: Job | None, rows: int, empty: LaneInput) -> LaneInput:
    if job is not None:
        return LaneInput(joined_rows(job), job.experts, job.weights, torch.ones(rows, dtype=torch.bool))
    return LaneInput(*(column.new_zeros((rows, *column.shape[1:])) for column in empty.columns()))
