"""Running kernels before their rank serves: on a GPU they are compiled at first use, which takes seconds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

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
    pairs: tuple[float, ...] = ()  # likely rows of all slots, one for every kernel that no room asks for

    @classmethod
    def over(cls, span: DispatchSpan, plan: Plan, slots: int) -> Arrivals:
        """What the dispatcher of `span` brings to a rank with `slots` slots."""
        problem, grouping = plan.problem, span.dispatcher.grouping
        rows = most = problem.lanes * span.up_to
        if grouping is Grouping.RAGGED:
            most = row_capacity(rows, problem.top_k, slots, plan.kernel.row_align)
        bare = cls(span.wire, grouping, slots, problem.shape.hidden, most)
        wide = slots if grouping is Grouping.PADDED else 1
        asked = {plan.kernel.span_for(room * wide).up_to for room in rooms(most)}
        starts = (0, *(kernel.up_to for kernel in plan.kernels[:-1]))
        missed = (
            float(min(kernel.up_to, rows) * problem.pairs_a_row)
            for start, kernel in zip(starts, plan.kernels, strict=True)
            if start < rows and kernel.up_to not in asked
        )
        return replace(bare, pairs=tuple(missed))

    def sizes(self) -> Iterator[tuple[int, float | None]]:
        """Room and likely rows of a slot: ever more room, then for kernels that no room asks for."""
        for room in rooms(self.most):
            yield room, None
        for pairs in self.pairs:
            likely = pairs / self.slots
            yield min(ceil(likely if self.grouping is Grouping.PADDED else pairs), self.most), likely

    def empty(self, rows: int, device: torch.device | str, likely: float | None = None) -> ExpertBatch:
        """A batch with room for `rows` and none in it; what stands in that room is undefined."""
        padded = self.grouping is Grouping.PADDED
        shape = (self.slots, rows, self.hidden) if padded else (rows, self.hidden)
        counts = torch.zeros(self.slots, dtype=torch.int32, device=device)
        starts = torch.arange(self.slots + 1, dtype=torch.int32, device=device) * (rows if padded else 0)
        return ExpertBatch(self.wire.empty(shape, device), self.grouping, counts, starts, likely)


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

    Returns how many were applied. One that does not fit beside the experts is left out with a warning, and so
    are larger ones: a step of that size would fail alike.
    """
    device, applied, fitting = next(iter(prepared.per_slot.values())).device, 0, arrivals.most
    for rows, likely in arrivals.sizes():
        if rows > fitting:
            continue
        try:
            kernel.apply(prepared, arrivals.empty(rows, device, likely))
        except torch.OutOfMemoryError as error:
            log.warning("a step's batch of %d rows would not fit beside the experts: %s", rows, error)
            fitting = rows - 1
        else:
            applied += 1
    return applied
