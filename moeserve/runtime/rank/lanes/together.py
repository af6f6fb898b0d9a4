"""`Together`: rows of several callers that are one job of a lane. Each of them may leave by itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

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

    @property
    def rows(self) -> int:
        """How many."""
        return self.hidden.shape[0]


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
        found, at = list[Segment](), 0
        with self._lock:
            for part in self.parts:
                if part.lent:
                    found.append(Segment(at, part.hidden, part.home))
                at += part.rows
        return found

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
        _each([part], lambda one: one.tell(error))
        _each([part], lambda one: one.done())

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
        _each(left, lambda part: part.tell(outcome))
        _each(left, lambda part: part.done())
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
        _each(lent, lambda part: part.given_back())


def _each(parts: Sequence[Part], act: Callable[[Part], None]) -> None:
    """Does so for each; what goes wrong with one concerns no other."""
    for part in parts:
        try:
            act(part)
        except Exception:
            log.exception("a caller's part of a step could not be ended")


@lru_cache(maxsize=64)
def _shape(rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """What rows of several places look like together, without any."""
    return torch.empty((rows, hidden), dtype=dtype, device="meta")
