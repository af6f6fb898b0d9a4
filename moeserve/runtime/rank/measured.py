"""What a GPU itself says of its steps: `DeviceTimes` of their phases, and `ExpertRows` that it computed.

The host launches a step and goes on, so its own clock sees only launches. Reading the device's costs a few
timestamps, which every `TIMED_EVERY`th step has: a timed graph is one of its own. Rows are counted in every
step, behind its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from moeserve.experts.batch import Tally

TIMED_EVERY = 8
"""Of so many steps one is timed. More than may be under way: a graph's timestamps are read before it runs
again.
"""


class Timestamp(Protocol):
    """A moment on the device's clock."""

    def record(self) -> None:
        """Takes it, behind the current stream's work so far."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this one to a later one; both have passed."""


def timestamp() -> Timestamp:
    """A new one; one that is recorded in a graph is taken anew at each replay."""
    recording = torch.cuda.is_current_stream_capturing()
    made: Timestamp = torch.cuda.Event(enable_timing=True, external=recording)  # type: ignore[no-untyped-call]
    return made


class DeviceTimes:
    """The timestamps of one step: at its start, and at the end of each phase."""

    def __init__(self, new: Callable[[], Timestamp] = timestamp) -> None:
        self._new = new
        self._marks: list[Timestamp] = []

    def mark(self) -> None:
        """A phase ends here, or the first begins."""
        made = self._new()
        made.record()
        self._marks.append(made)

    def seconds(self) -> list[float]:
        """Seconds of each phase; to be asked when the step has ended."""
        return [one.elapsed_time(other) / 1e3 for one, other in pairwise(self._marks)]


class RowsReading:
    """What was counted up to a moment; its copy to the host runs behind the steps launched before it. sums:
    `[2, layers]`, of rows that experts computed and of those that were taken.
    """

    def __init__(self, sums: Tensor) -> None:
        self._host = sums.to("cpu", non_blocking=True)
        self._copied: torch.cuda.Event | None = None
        if sums.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> list[int]:
        """Rows of experts since the start, by position of the layer; waits for the copy."""
        return self._read(0)

    def taken(self) -> list[int]:
        """Likewise rows that a kernel took from device lanes."""
        return self._read(1)

    def _read(self, at: int) -> list[int]:
        if self._copied is not None:
            self._copied.synchronize()
        return [int(count) for count in self._host[at].tolist()]


class ExpertRows:
    """(token, expert) rows that a rank's experts computed, counted on the device, by layer, and rows that its
    kernels took from device lanes; one thread's.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        # by slots: for each layer a row `[slots + 1]` int64, whose last is of rows that were taken
        self._tables: dict[int, tuple[Tensor, ...]] = {}
        self._pending: tuple[int, Tensor] | None = None

    def take(self, position: int, counts: Tensor) -> None:
        """Keeps the rows by slot `[slots]` of a step that was launched, to be counted behind its answer."""
        self.count()
        self._pending = position, counts

    def count(self) -> None:
        """Counts what was kept: one small kernel, which the step's answer does not wait for."""
        if self._pending is None:
            return
        (position, counts), self._pending = self._pending, None
        self.tally(position, counts).add()

    def tally(self, position: int, counts: Tensor) -> Tally:
        """What counts the rows of a step, of one that is recorded at each replay. Raises RuntimeError where
        it is recorded, and none with as many slots was counted before: there is no memory for them, and a
        graph can have none of its own.
        """
        counts = counts.flatten()
        slots = counts.numel()
        if slots not in self._tables:
            if counts.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("rows of a recorded step are counted where those of a step were before")
            table = torch.zeros((self._layers, slots + 1), dtype=torch.int64, device=counts.device)
            self._tables[slots] = table.unbind()
        row = self._tables[slots][position]
        return Tally(counts, row[:-1], row[-1:])

    def reading(self) -> RowsReading | None:
        """What was counted so far; None where nothing was."""
        self.count()
        sums = list[Tensor]()
        for rows in self._tables.values():
            table = torch.stack(rows)
            sums.append(torch.stack((table[:, :-1].sum(dim=1), table[:, -1])))
        return RowsReading(torch.stack(sums).sum(dim=0)) if sums else None


def since(now: Sequence[int], before: Sequence[int]) -> list[int]:
    """By how much each count has grown; before a first reading there was nothing."""
    return [one - other for one, other in zip(now, before or [0] * len(now), strict=True)]
