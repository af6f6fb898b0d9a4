"""Running kernels before their rank serves: on a GPU they are compiled at first use, which takes seconds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moeserve.dispatch.permute import row_capacity
from moeserve.experts.batch import ExpertBatch, Grouping
from moeserve.experts.kernel import Kernel, Prepared
from moeserve.quant.format import Format
from moeserve.runtime.planning.plan import DispatchSpan, Plan

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrivals:
    """The batches a dispatcher can bring to a kernel."""

    wire: Format
    grouping: Grouping
    slots: int  # e
    hidden: int
    most: int  # rows of a RAGGED batch, of one slot of a PADDED one

    @classmethod
    def over(cls, span: DispatchSpan, plan: Plan, slots: int) -> Arrivals:
        """What the dispatcher of `span` brings to a rank with `slots` slots."""
        problem, grouping = plan.problem, span.dispatcher.grouping
        rows = problem.ranks * span.up_to
        if grouping is Grouping.RAGGED:
            rows = row_capacity(rows, problem.top_k, slots, plan.kernel.row_align)
        return cls(span.wire, grouping, slots, problem.shape.hidden, rows)

    def empty(self, rows: int, device: torch.device) -> ExpertBatch:
        """A batch with room for `rows` and none in it; what stands in that room is undefined."""
        padded = self.grouping is Grouping.PADDED
        shape = (self.slots, rows, self.hidden) if padded else (rows, self.hidden)
        counts = torch.zeros(self.slots, dtype=torch.int32, device=device)
        starts = torch.arange(self.slots + 1, dtype=torch.int32, device=device) * (rows if padded else 0)
        return ExpertBatch(self.wire.empty(shape, device), self.grouping, counts, starts)


def rooms(most: int) -> Iterator[int]:
    """1, 2, 4, ... and `most`: at least one of every range by which a kernel picks its tiles."""
    rows = 1
    while rows < most:
        yield rows
        rows *= 2
    if most > 0:
        yield most


def warm(kernel: Kernel, prepared: Prepared, arrivals: Arrivals) -> int:
    """Applies `kernel` to batches without a row and with ever more room, by which it picks its variants.

    Returns how many; a batch that does not fit beside the experts ends it with a warning, for a step of that
    size would fail alike.
    """
    device, applied = next(iter(prepared.per_slot.values())).device, 0
    for rows in rooms(arrivals.most):
        try:
            kernel.apply(prepared, arrivals.empty(rows, device))
        except torch.OutOfMemoryError as error:
            log.warning("a step's batch of %d rows would not fit beside the experts: %s", rows, error)
            break
        applied += 1
    return applied
