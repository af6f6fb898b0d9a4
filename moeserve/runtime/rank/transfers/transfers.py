"""Rows on their way from callers' memory to a rank's device, and answers on their way home: `Transfers`.

A door's thread uploads large rows as soon as a job is there, while the job waits for its step. The thread of
the steps gathers what is on the device, brings the rest through pinned memory, and queues the answers' copies
behind the step; it waits for nothing. Where a caller's memory is registered with the device, its engines read
the rows and write the answer there, and the host copies neither.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.runtime.rank.transfers.engines import Engines, Passed
from moeserve.runtime.rank.transfers.step_room import StagedRoutes, StepRoom
from moeserve.runtime.step import Job, Moment, Segment, Upload, joined_rows

DIRECT_BYTES = 64 << 10
"""Rows and answers of this size on are copied by the device's engines each by itself. Smaller ones share one
copy: to queue a copy costs as much as 20 KB of copying by the host.
"""

AHEAD_BYTES, ENGINES_AHEAD_BYTES = 2 << 20, 8 << 20
"""Rows of this size on are uploaded before their step is known: those that the host copies first, and those
that the engines read where the caller has them. Smaller ones take less time than the calls of the driver and
the further copy on the device that this costs, in which a rank's other threads wait for the interpreter.
"""

ASIDE_BYTES = 8 << 20
"""Answers of this size on go home on a stream of their own, while the next step computes. Smaller ones go on
the stream of the steps, so that the next one may write its answer to the same memory: to copy them there, and
to have another stream wait for that, takes a host longer than the device.
"""


@dataclass(eq=False)
class InFlight:
    """What a step's copies need until they have ended, and the answers that they bring."""

    outputs: list[Tensor | None]  # by job, [T, H] on the host; None for a job that is gone
    event: Moment
    kept: list[object]  # memory of the device and of the host
    releases: list[Callable[[], None]]  # of callers' memory

    @classmethod
    def there(cls, answer: Tensor, parts: Sequence[tuple[int, Job | None]]) -> InFlight:
        """An answer `[T, H]` that is on the host already; `parts` as `Transfers.fetch` takes them."""
        sizes = [rows for rows, _ in parts]
        outputs: list[Tensor | None] = [answer]
        if len(sizes) != 1:
            outputs = list(torch.split(answer, sizes)) if sizes else []
        return cls(outputs, Passed(), [], [])

    def release(self) -> None:
        """The copies have ended: callers' memory is used no more, and what was kept is free."""
        for release in self.releases:
            release()
        self.kept, self.releases = [], []


class Transfers:
    """The copies of one rank to and from its device. `upload` is called by doors' threads, the rest by the
    thread of the steps.

    ahead: bytes that jobs which are in no step may hold on the device; the rows of others are brought with
    their steps.
    """

    def __init__(self, engines: Engines, ahead: int) -> None:
        self.engines = engines
        self._room = ahead
        self._lock = threading.Lock()  # over the room
        self._uses: list[Callable[[], None]] = []  # of callers' memory, by the step that is being launched

    def upload(self, job: Job) -> Upload | None:
        """Begins to bring large hidden states to the device; None for small ones, and without room for them.

        Rows that do not lie in registered memory are copied to pinned memory first, by this thread.
        """
        nbytes, lent = job.hidden.nbytes, job.lent
        least = AHEAD_BYTES if lent is None or not lent.rows else ENGINES_AHEAD_BYTES
        if nbytes < least or not self._take(nbytes):
            return None
        engines, source = self.engines, job.hidden
        given_back = lent.memory.done if lent is not None and lent.rows and lent.memory.use() else None

        def release() -> None:
            self._take(-nbytes)
            if given_back is not None:
                given_back()

        try:
            engines.use()
            if given_back is None:
                source = engines.pinned(source.shape, source.dtype)
                source.copy_(joined_rows(job))
            with engines.uploading():
                rows = torch.empty(source.shape, dtype=source.dtype, device=engines.device)
                if given_back is None:
                    rows.copy_(source, non_blocking=True)  # torch keeps the pinned memory until then
                else:
                    self._bring(source, job.segments, (rows, 0))
                return Upload(rows, engines.event(), release)
        except torch.OutOfMemoryError:
            release()
            return None
        except BaseException:
            engines.settle()  # some of the rows may be on their way
            release()
            raise

    def _take(self, nbytes: int) -> bool:
        """Takes so much of the room for uploads, where it is there; less than 0 gives it back."""
        with self._lock:
            fits = nbytes <= max(0, self._room)
            self._room -= nbytes if fits else 0
            return fits

    def gather(self, room: StepRoom, parts: Sequence[tuple[int, Job | None]]) -> list[object]:
        """Brings the rows of a step's jobs into `room`; rows of a job that is gone are not valid.

        parts: rows and job, in the order of the step. Returns what has to be kept until the step has ended.
        """
        kept: list[object] = [self._gather_routes(room, parts)]
        waiting: list[tuple[int, Job]] = []  # neighbours that share a copy
        at, begin = 0, 0
        for rows, job in parts:
            here = slice(at, at + rows)
            at += rows
            if job is not None and job.upload is None and not self._direct(job, len(parts)):
                begin = begin if waiting else here.start
                waiting.append((rows, job))
                continue
            if waiting:
                kept.append(self._shared(room.rows.hidden, begin, waiting))
                waiting = []
            if job is not None:
                kept.append(self._brought(room, here, job))
        if waiting:
            kept.append(self._shared(room.rows.hidden, begin, waiting))
        return kept

    def _gather_routes(self, room: StepRoom, parts: Sequence[tuple[int, Job | None]]) -> StagedRoutes:
        """Queues the copy of the step's routes. Memory for them is kept with the room, which a graph has for
        all its steps: to get pinned memory for each takes longer than to fill it.
        """
        rows, top_k = room.rows.experts.shape
        if room.staged:
            staged = room.staged.popleft()
        else:
            staged = StagedRoutes(self.engines.pinned(room.routes.shape, torch.uint8), rows, top_k)
        self._uses.append(lambda: room.staged.append(staged))
        staged.fill(parts)
        self._copy(staged.memory, (room.routes, 0), to_host=False)
        return staged

    @staticmethod
    def _direct(job: Job, jobs: int) -> bool:
        """Whether the device's engines read the job's rows where the caller has them."""
        large = job.hidden.nbytes >= DIRECT_BYTES or jobs == 1 or job.hidden.is_meta
        return large and job.lent is not None and job.lent.rows

    def _brought(self, room: StepRoom, here: slice, job: Job) -> object:
        """Queues the copy of one job's rows, from where they were uploaded to or from the caller's memory."""
        into = room.rows.hidden
        if job.upload is not None:
            self.engines.follow(job.upload.event)
            self._copy(job.upload.rows, (into, here.start), to_host=False)
            self._uses.append(job.upload.release)
            return job.upload
        if job.lent is not None and job.lent.memory.use():
            self._uses.append(job.lent.memory.done)
            self._bring(job.hidden, job.segments, (into, here.start))
            return job.hidden
        return self._shared(into, here.start, [(here.stop - here.start, job)])

    def _bring(self, hidden: Tensor, segments: Sequence[Segment], where: tuple[Tensor, int]) -> None:
        """Queues the copies of a job's rows, which lie apart in `segments` if there are any."""
        if not hidden.is_meta:
            self._copy(hidden, where, to_host=False)
            return
        whole, at = where
        first, row = whole.data_ptr(), whole.shape[1] * whole.itemsize
        copies = [(first + (at + one.at) * row, one.hidden.data_ptr(), one.hidden.nbytes) for one in segments]
        self.engines.copy(copies)

    def _copy(self, part: Tensor, where: tuple[Tensor, int], *, to_host: bool) -> None:
        """Queues the copy of a caller's rows into a step's, at a row, or of an answer's to the caller's."""
        whole, at = where
        if part.dtype == whole.dtype and part.is_contiguous():
            row = whole.shape[1] * whole.itemsize if at else 0
            there = whole.data_ptr() + at * row
            places = (part.data_ptr(), there) if to_host else (there, part.data_ptr())
            self.engines.copy([(*places, part.nbytes)])
            return
        rows = whole[at : at + part.shape[0]]
        if to_host:
            part.copy_(rows, non_blocking=True)
        else:
            rows.copy_(part, non_blocking=True)

    def _shared(self, hidden: Tensor, at: int, jobs: Sequence[tuple[int, Job]]) -> Tensor:
        """Queues one copy of the rows of several jobs, through pinned memory, to row `at` of `hidden`."""
        count = sum(rows for rows, _ in jobs)
        staged = self.engines.pinned((count, hidden.shape[1]), hidden.dtype)
        begin = 0
        for rows, job in jobs:
            staged[begin : begin + rows] = joined_rows(job)
            begin += rows
        hidden[at : at + count].copy_(staged, non_blocking=True)
        return staged

    def fetch(
        self,
        answer: Tensor,
        parts: Sequence[tuple[int, Job | None]],
        kept: list[object],
        *,
        busy: bool = False,
    ) -> InFlight:
        """Queues the copies of a step's answer `[T, H]` to its callers, and waits for none.

        busy: other steps are under way, and their launches are not to be held up by who waits for this one.

        Large parts go to a caller's registered memory at once; the others through pinned memory. Where it
        raises, `abandoned` has to follow.
        """
        answer = answer if answer.is_contiguous() else answer.contiguous()  # copies take rows by their places
        aside = answer.nbytes >= ASIDE_BYTES
        with self.engines.downloading() if aside else nullcontext():
            outputs = list(self._fetched(answer, parts))
            event = self.engines.event(sleeps=busy)
        uses, self._uses = self._uses, []
        uses.append(lambda: self.engines.reuse(event, sleeps=busy))
        return InFlight(outputs, event, [*kept, answer], uses)

    def abandoned(self, parts: Sequence[tuple[int, Job | None]]) -> InFlight:
        """What has to be waited for where the step of `parts` could not be launched or fetched: its copies of
        both directions so far, and the uploads of its jobs. Where it raises, the next step's end lets go of
        what they use.
        """
        uploads = [job.upload for _, job in parts if job is not None and job.upload is not None]
        self._uses += [upload.release for upload in uploads]
        with self.engines.downloading():
            for upload in uploads:
                self.engines.follow(upload.event)
            event = self.engines.event(sleeps=True)
        uses, self._uses = self._uses, []
        return InFlight([], event, list(uploads), uses)

    def _fetched(self, answer: Tensor, parts: Sequence[tuple[int, Job | None]]) -> Iterator[Tensor | None]:
        shared: Tensor | None = None  # pinned memory of the whole answer, for those who share a copy
        at = 0
        for rows, job in parts:
            here = slice(at, at + rows)
            at += rows
            home = None if job is None or job.lent is None else job.lent.home
            large = rows * answer.shape[1] * answer.itemsize >= DIRECT_BYTES
            if job is None:
                yield None
            elif job.hidden.is_meta:
                yield self._home_apart(job, answer, here)
            elif home is not None and (large or len(parts) == 1) and job.lent.memory.use():  # type: ignore[union-attr]
                self._uses.append(job.lent.memory.done)  # type: ignore[union-attr]
                self._copy(home, (answer, here.start), to_host=True)
                yield home
            elif large:
                alone = self.engines.pinned((rows, answer.shape[1]), answer.dtype)
                alone.copy_(answer[here], non_blocking=True)
                yield alone
            else:
                if shared is None:
                    shared = self.engines.pinned(answer.shape, answer.dtype)
                    shared.copy_(answer, non_blocking=True)
                yield shared[here]

    def _home_apart(self, job: Job, answer: Tensor, here: slice) -> Tensor:
        """Queues the copies of an answer to several callers. Returns a meta tensor, as it lies where each of
        them wants it; or the answer in pinned memory, where their memory was given back.
        """
        lent = job.lent
        if lent is None or not lent.memory.use():
            alone = self.engines.pinned((here.stop - here.start, answer.shape[1]), answer.dtype)
            alone.copy_(answer[here], non_blocking=True)
            return alone
        self._uses.append(lent.memory.done)
        first, row = answer.data_ptr(), answer.shape[1] * answer.itemsize
        homes = [
            (one.home.data_ptr(), first + (here.start + one.at) * row, one.home.nbytes)
            for one in job.segments
        ]
        self.engines.copy(homes)
        return job.hidden


def transfers_of(device: str, lane_bytes: int) -> Transfers | None:
    """The copies of a rank on `device`; None on a CPU, where a step takes rows as they lie on the host.

    lane_bytes: the hidden states of as many rows as a lane brings to a step; as many for two steps are
    uploaded ahead.
    """
    return None if device == "cpu" else Transfers(Engines(device), 2 * lane_bytes)
