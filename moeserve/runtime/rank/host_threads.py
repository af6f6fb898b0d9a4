"""`HostThreads`: how many threads compute a step on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moeserve.experts.kernel import Problem

OPERATIONS = 1 << 24
"""Floating-point operations of a step, from which a second thread computes, and another for each so many
more. To have others join in takes tens of microseconds for each of a step's products, and they look for more
to do for milliseconds after it, in which nobody else has their cores: on two cores a caller's next request
waits. Measured there, inside a service: one thread was faster at 1 million, as fast as two at 25, slower at
100.
"""


class HostThreads:
    """Sets torch's threads before each step, in a process whose owner this is; by the thread of the steps.

    most: as many compute a large step.
    """

    def __init__(self, most: int) -> None:
        self.most = self._now = most

    def use(self, problem: Problem, lane_rows: Sequence[int]) -> None:
        """Has as many threads as pay compute the next step of a layer. lane_rows: of each lane."""
        threads = min(self.most, threads_for(problem, sum(lane_rows)))
        if threads != self._now:
            torch.set_num_threads(threads)
            self._now = threads


def threads_for(problem: Problem, rows: int) -> int:
    """The threads that pay for a step of so many rows, of all lanes together."""
    owners = 1 if problem.sliced else max(1, problem.owners - problem.reserved_owners)
    each = 6 * problem.shape.hidden * problem.shape.inner  # a row's at one expert: three products
    return 1 + rows * problem.top_k * each // (owners * OPERATIONS)
