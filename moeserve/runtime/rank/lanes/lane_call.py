"""`LaneBatch`: what a door has checked and routed; `LaneCall`: one caller's batch on a lane."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.runtime.errors import one_version
from moeserve.runtime.step import Job, Lent, Routed, Stamp


@dataclass(frozen=True, eq=False)
class LaneBatch:
    """One call's rows: what a door has checked and routed."""

    layer: int
    hidden: Tensor  # [T, H] of the served dtype
    experts: Tensor  # [T, K] int32, EMPTY = none
    weights: Tensor  # [T, K] float32, final
    deadline: float = math.inf  # time.monotonic() seconds
    weights_version: int = 0  # demanded; 0: none
    lent: Lent | None = None  # what a device may touch of the caller's memory
    routed: Routed | None = None  # logits, where a correction bias took part in choosing the experts

    def parts(self, capacity: int) -> list[slice]:
        """The rows in pieces of at most `capacity`."""
        rows = self.hidden.shape[0]
        return [slice(at, min(rows, at + capacity)) for at in range(0, rows, capacity)]


class LaneCall:
    """A batch under way. It ends once: answered whole, or failed with the first failure of its parts."""

    def __init__(self, ended: Callable[[LaneCall], None] = lambda call: None) -> None:
        self.jobs: list[Job] = []
        self.home: Tensor | None = None  # [T, H], where a device may write the answer of all jobs
        self.error: Exception | None = None
        self._ended = ended
        self._left = 0
        self._lock = threading.Lock()
        self._done = False
        self._waiter: threading.Event | None = None  # made by who waits; most are told of the end instead

    def expect(self, jobs: list[Job]) -> None:
        """Names the parts that have to end before the call does."""
        self.jobs, self._left = jobs, len(jobs)

    def part_ended(self, job: Job) -> None:
        """Notes that one part was answered or has failed."""
        with self._lock:
            if self._done:
                return
            self._left -= 1
            self.error = self.error or job.error
            if self._left and self.error is None:
                return
            self._done = True
        self._end()

    def give_up(self, error: Exception) -> None:
        """Lets its waiter go with `error`, unless it has ended; parts that still end are nobody's."""
        with self._lock:
            if self._done:
                return
            self.error = error
            self._done = True
        self._end()

    def revoke(self) -> bool:
        """Ends it without telling anybody, for a batch that could not be started; False where it has ended.

        Whose batch it is hears of it otherwise.
        """
        with self._lock:
            if self._done:
                return False
            self._done = True
        self._ended = _nobody_asks
        self._end()
        return True

    def _end(self) -> None:
        """Tells of the end, once. The call and its jobs hold each other no more: both go when nobody reads
        the answer, without waiting for a collection."""
        if self._waiter is not None:  # whoever makes one later sees that it is done
            self._waiter.set()
        for job in self.jobs:
            job.disown()
        ended, self._ended = self._ended, _nobody_asks
        ended(self)

    @property
    def ended(self) -> bool:
        """Whether the call has been answered or has failed."""
        return self._done

    def wait(self, seconds: float) -> bool:
        """Whether it ended within `seconds`. One thread waits for a call."""
        with self._lock:
            if self._done:
                return True
            self._waiter = waiter = threading.Event()
        return waiter.wait(None if math.isinf(seconds) else max(0.0, seconds))

    @property
    def in_place(self) -> bool:
        """Whether the whole answer lies where it is wanted."""
        home = self.home
        if home is None:
            return False
        return all(job.output is not None and lies_in(job.output, home) for job in self.jobs)

    def result(self) -> tuple[Tensor, Stamp]:
        """The answer `[T, H]` and the oldest of its parts' stamps. Raises what the call failed with.

        Parts that saw different weights give no answer: GroupUnavailable, and the call may be made again.
        """
        if self.error is not None:
            raise self.error
        one_version(job.stamp.weights_version for job in self.jobs)
        outputs = [job.output for job in self.jobs if job.output is not None]
        return joined(outputs, self.home), min(job.stamp for job in self.jobs)


def joined(outputs: list[Tensor], home: Tensor | None) -> Tensor:
    """The rows of all `outputs`; `home`, where they were written there part by part."""
    if len(outputs) == 1:
        return outputs[0]
    if home is not None and all(lies_in(output, home) for output in outputs):
        return home
    return torch.cat(outputs) if home is None else torch.cat([part.to(home.dtype) for part in outputs])


def lies_in(part: Tensor, whole: Tensor) -> bool:
    """Whether `part` is some of the memory of `whole`; both are dense, on the host."""
    first, last = whole.data_ptr(), whole.data_ptr() + whole.nbytes
    return part.device == whole.device and first <= part.data_ptr() and part.data_ptr() + part.nbytes <= last


def _nobody_asks(call: LaneCall) -> None:
    """Hears that a call ended whose end was told."""
