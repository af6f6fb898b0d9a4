"""`HostThreads`: how many threads compute a step on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec

import torch

from moeserve.experts.kernel import Problem

P = ParamSpec("P")

OPERATIONS = 1 << 24
"""Floating-point operations of a step, from which a second thread computes, and another for each so many
more. To have others join in takes tens of microseconds for each of a step's products, and they look for more
to do for milliseconds after it, in which nobody else has their cores: on two cores a caller's next request
waits. Measured there, inside a service: one thread was faster at 1 million, as fast as two at 25, slower at
100.
"""


class HostThreads:
    """Sets torch's threads for each step, in a process whose owner this is; by the thread of the steps.

    most: as many compute a large step, and whatever that thread does between two steps.
    """

    def __init__(self, most: int) -> None:
        self.most = self._now = most

    @contextmanager
    def computing(self, problem: Problem, lane_rows: Sequence[int]) -> Iterator[None]:
        """Has as many threads as pay compute a step of a layer meanwhile. lane_rows: of each lane."""
        self._set(min(self.most, threads_for(problem, sum(lane_rows))))
        try:
            yield
        finally:
            self._set(self.most)

    def _set(self, threads: int) -> None:
        if threads != self._now:
            torch.set_num_threads(threads)
            self._now = threads


def as_here(run: Callable[P, None]) -> Callable[P, None]:
    """What a thread runs: it computes with as many threads as the calling one does now. Else it would take
    what is set when it first computes, which may be a small step's.
    """
    threads = torch.get_num_threads()

    def started(*given: P.args, **named: P.kwargs) -> None:
        torch.set_num_threads(threads)
        run(*given, **named)

    return started


def threads_for(problem: Problem, rows: int) -> int:
    """The threads that pay for a step of so many rows, of all lanes together."""
    owners = 1 if problem.sliced else max(1, problem.owners - problem.reserved_owners)
    each = 6 * problem.shape.hidden * problem.shape.inner  # a row's at one expert: three products
    return 1 + rows * problem.top_k * each // (owners * OPERATIONS)
