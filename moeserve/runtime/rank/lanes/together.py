"""`Together`: rows of several callers that are one job of a lane. Each of them may leave by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from numpy import int32
from numpy.typing import NDArray
from torch import Tensor

from moeserve.experts.placement import EMPTY
from moeserve.runtime.errors import GroupUnavailable
from moeserve.runtime.step import CallerMemory, Job, Lent, Segment, Stamp

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
        self, parts: Sequence[Part], choice: tuple[NDArray[int32], Tensor], over: Callable[[Job], None]
    ) -> None:
        """choice: ids `[T, K]` int32 and weights `[T, K]` float32 of all rows, in the order of the parts.
        over: called when the job has ended, and all were told.
        """
        self.parts, self._over = tuple(parts), over
        self._ids, self._weights = choice
        self._job: Job | None = None
        self._memory = CallerMemory(self._give_back)
        self._taken = False  # by a step
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
        hidden = _shape(self.rows, first.hidden) if several else first.hidden
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

    def take(self, *, by_step: bool) -> None:
        """Notes that a step has the rows, or no more: whoever leaves meanwhile has its memory kept."""
        with self._lock:
            self._taken = by_step

    @property
    def segments(self) -> Iterator[Segment]:
        """Where the rows lie that are still there, and where their answers go."""
        at = 0
        for part in self.parts:
            if part.lent:
                yield Segment(at, part.hidden, part.home)
            at += part.rows

    def leave(self, part: Part, error: Exception) -> None:
        """Ends one part with `error`, unless it has ended; the others go on."""
        with self._lock:
            if not part.open:
                return
            part.open, free = False, not self._taken
            if free:
                at = sum(one.rows for one in self.parts[: self.parts.index(part)])
                self._ids[at : at + part.rows] = EMPTY
                part.lent = False
            last = not any(one.open for one in self.parts)
        if free:
            part.given_back()
        part.tell(error)
        part.done()
        if last and free and self._job is not None:
            self._job.fail(error)

    def _ended(self, job: Job) -> None:
        """The job was answered or has failed."""
        with self._lock:
            left = [part for part in self.parts if part.open]
            for part in left:
                part.open = False
        outcome: Outcome = job.error or (
            job.stamp if job.output is not None else GroupUnavailable("the step gave no answer")
        )
        if job.output is not None and not isinstance(outcome, Exception):
            self._bring_home(job.output, left)
        job.disown()
        self._memory.done()
        for part in left:
            part.tell(outcome)
        for part in left:
            part.done()
        self._over(job)

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
            part.given_back()


def _shape(rows: int, like: Tensor) -> Tensor:
    """What rows of several places look like together, without any."""
    return torch.empty((rows, like.shape[1]), dtype=like.dtype, device="meta")
