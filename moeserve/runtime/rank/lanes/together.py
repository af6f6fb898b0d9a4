"""`Together`: rows of several callers that are one job of a lane. Each of them may leave by itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

import torch
from numpy import int32
from numpy.typing import NDArray
from torch import Tensor

from moeserve.experts.placement import EMPTY
from moeserve.runtime.errors import GroupUnavailable
from moeserve.runtime.step import CallerMemory, Job, Lent, Segment, Stamp

log = logging.getLogger(__name__)

Outcome = Stamp | Exception
"""How a caller's rows ended: answered, or not."""


@dataclass(eq=False)
class Part:
    """One caller's rows `[T, H]`, where their answer is wanted, and who hears of their end.

    tell: called once, from any thread, and `done` behind it, when all have heard who are told with it.
    given_back: called when neither the rank nor its device touches the caller's memory for them any more.
    """

    hidden: Tensor
    home: Tensor
    tell: Callable[[Outcome], None]
    done: Callable[[], None]
    given_back: Callable[[], None]
    open: bool = True  # its end was not told
    lent: bool = True  # its memory is not given back
    rows: int = field(init=False)  # how many

    def __post_init__(self) -> None:
        self.rows = self.hidden.shape[0]


class Together:
    """Safe from any thread. `job` makes the job; before, nothing can end."""

    def __init__(
        self,
        parts: Sequence[Part],
        choice: tuple[NDArray[int32], Tensor],
        ended: Callable[[Job], None],
        over: Callable[[], None],
    ) -> None:
        """choice: ids `[T, K]` int32 and weights `[T, K]` float32 of all rows, in the order of the parts.
        ended: called when the job has ended, before anybody is told, and `over` when all were told.
        """
        self.parts, self._before, self._over = tuple(parts), ended, over
        self._ids, self._weights = choice
        ends = accumulate(part.rows for part in parts)
        self._segments = [
            Segment(end - part.rows, part.hidden, part.home) for part, end in zip(parts, ends, strict=True)
        ]
        self.gathered = False  # whether they are all who were there, and others come with the next one
        self._job: Job | None = None
        self._memory = CallerMemory(self._give_back)
        self._done = False
        self._lock = threading.Lock()

    @property
    def rows(self) -> int:
        """Of all parts."""
        return len(self._ids)

    def job(self, number: int, what: tuple[int, int], deadline: float, reached: tuple[bool, bool]) -> Job:
        """The job of all parts. what: the layer, and the version of its weights, 0 for any. reached: whether
        the device reads their rows, and writes their answers, in place.
        """
        first, several = self.parts[0], len(self.parts) > 1
        hidden = _shape(self.rows, first.hidden.shape[1], first.hidden.dtype) if several else first.hidden
        home = first.home if reached[1] and not several else None
        layer, version = what
        self._job = Job(
            number,
            layer,
            hidden,
            torch.from_numpy(self._ids),
            self._weights,
            deadline,
            self._ended,
            version,
            Lent(self._memory, reached[0], home),
            several=self,
        )
        return self._job

    @property
    def callers(self) -> int:
        """How many there were."""
        return len(self.parts)

    @property
    def segments(self) -> list[Segment]:
        """Where the rows lie that are still there, and where their answers go. Whoever touches them has said
        so before (`Job.lent.memory.use`): then their memory is not given back meanwhile.
        """
        with self._lock:
            return [segment for part, segment in zip(self.parts, self._segments, strict=True) if part.lent]

    def leave(self, part: Part, error: Exception) -> None:
        """Ends one part with `error`, unless it has ended; the others go on. Its memory is given back at once
        where nothing touches the rows of the job, and when nothing does any more else. Whoever is about to
        touch those of several callers asks for `segments` behind that; one caller's memory goes with its job.
        """
        with self._lock:
            if not part.open:
                return
            several = len(self.parts) > 1
            part.open, free, job = False, several and part.lent and self._memory.idle, self._job
            if free:
                at = sum(one.rows for one in self.parts[: self.parts.index(part)])
                self._ids[at : at + part.rows] = EMPTY
                part.lent = False
            last = not any(one.open for one in self.parts)
        if free:
            part.given_back()
        if last and job is not None:
            job.fail(error)  # before its caller hears of it: the lane holds nothing any more
        _tell([part], error)

    def _ended(self, job: Job) -> None:
        """The job was answered or has failed."""
        with self._lock:
            if self._done:
                return
            self._done = True
            left = [part for part in self.parts if part.open]
            for part in left:
                part.open = False
        outcome: Outcome = job.error or (
            job.stamp if job.output is not None else GroupUnavailable("the step gave no answer")
        )
        try:
            if job.output is not None and not isinstance(outcome, Exception):
                self._bring_home(job.output, left)
        except Exception as error:
            log.exception("the answer of a step cannot be brought to its callers")
            job.error = outcome = error
        job.disown()
        self._before(job)
        self._memory.done()
        _tell(left, outcome)
        self._job = job.several = None  # which hold each other
        self._over()

    def _bring_home(self, output: Tensor, parts: Sequence[Part]) -> None:
        """Copies the answers that do not lie where they are wanted."""
        if output.is_meta or output.data_ptr() == self.parts[0].home.data_ptr():
            return
        at = 0
        for part in self.parts:
            if part in parts:
                part.home.copy_(output[at : at + part.rows])
            at += part.rows

    def _give_back(self) -> None:
        with self._lock:
            lent = [part for part in self.parts if part.lent]
            for part in lent:
                part.lent = False
        for part in lent:
            try:
                part.given_back()
            except Exception:
                log.exception(NOT_ENDED)


NOT_ENDED = "a caller's part of a step could not be ended"
"""What is logged of one for whom something goes wrong, which concerns no other."""


def _tell(parts: Sequence[Part], outcome: Outcome) -> None:
    """Tells all, and is done with them then."""
    for part in parts:
        try:
            part.tell(outcome)
        except Exception:
            log.exception(NOT_ENDED)
    for part in parts:
        try:
            part.done()
        except Exception:
            log.exception(NOT_ENDED)


@lru_cache(maxsize=64)
def _shape(rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """What rows of several places look like together, without any."""
    return torch.empty((rows, hidden), dtype=dtype, device="meta")
