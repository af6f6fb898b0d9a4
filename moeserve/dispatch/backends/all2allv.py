"""One copy of a row for each rank that holds one of its slots, with ids and weights; one partial sum back.

Destinations depend on the routing, so split sizes are exchanged first and, on a GPU, read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moeserve.dispatch.checks import check_lane, check_spec, local_slots
from moeserve.dispatch.dispatcher import (
    Dispatched,
    DispatchEntry,
    Dispatcher,
    DispatchSpec,
    Pace,
    Traffic,
)
from moeserve.dispatch.exchange import PARTIAL_SUMS, TORCH_ARCHS, check_group, exchange
from moeserve.dispatch.permute import Homes, group_rows, take_rows, weigh_rows
from moeserve.dispatch.routing import Routing
from moeserve.dispatch.wire import ROW_WISE, WireRecord
from moeserve.experts.batch import Grouping


@dataclass(frozen=True, eq=False)
class _CopiesTicket:
    homes: Homes
    sent: list[int]  # copies for each rank
    received: list[int]  # copies from each rank
    copies: Tensor  # [N] int64: this lane's copies, row by row and in rank order, by place among those sent
    starts: Tensor  # [T] int64: where each row's begin in `copies`


class AllToAllV(Dispatcher):
    """The dispatcher over torch.distributed's default group."""

    def __init__(self, spec: DispatchSpec) -> None:
        check_spec(spec)
        check_group(spec)
        self._spec = spec
        self._record = WireRecord(spec.wire, spec.hidden, spec.top_k)
        self._traffic = Traffic()

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """Sends each row once to every rank it needs and groups what arrived by slot."""
        spec = self._spec
        check_lane(spec, hidden, routing)
        bound = destinations(spec, routing.slots)  # [T, ranks]
        sent, received = self._counts(bound)
        rows = bound.T.nonzero()[:, 1]  # by rank, then by row
        outgoing = take_rows(self._record.pack(hidden, routing), rows)
        arrived = outgoing.new_empty((sum(received), self._record.nbytes))
        exchange(arrived, outgoing, received, sent)
        self._count(dispatched=(sum(sent) - sent[spec.rank]) * self._record.nbytes + 8 * (spec.ranks - 1))
        tokens, slots, weights = self._record.unpack(arrived)
        batch, homes = group_rows(tokens, local_slots(spec, slots), weights, (spec.slots, spec.row_align))
        place = bound.T.flatten().cumsum(0).view(bound.T.shape).T - 1  # [T, ranks]: where each copy stands
        taken = bound.sum(dim=1)
        ticket = _CopiesTicket(homes, sent, received, place[bound], taken.cumsum(0) - taken)
        return Dispatched(batch, ticket)

    def combine(self, outputs: Tensor, ticket: _CopiesTicket) -> Tensor:
        """Sends every copy's partial sum back, and adds up each row's, in rank order: `[T, H]`."""
        spec = self._spec
        partials = weigh_rows(outputs, ticket.homes, spec.dtype)
        back = partials.new_empty((sum(ticket.sent), spec.hidden))
        exchange(back, partials, ticket.sent, ticket.received)
        others = sum(ticket.received) - ticket.received[spec.rank]
        self._count(combined=others * spec.hidden * spec.dtype.itemsize)
        if back.shape[0]:
            answer = F.embedding_bag(ticket.copies, back.float(), ticket.starts, mode="sum").to(spec.dtype)
        else:
            answer = back.new_zeros((ticket.starts.shape[0], spec.hidden))
        return answer

    def _counts(self, bound: Tensor) -> tuple[list[int], list[int]]:
        """Copies this rank sends to each rank, and those each rank sends here."""
        sent = bound.sum(dim=0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        counts: list[list[int]] = torch.stack((sent, received)).tolist()
        return counts[0], counts[1]

    def _count(self, dispatched: int = 0, combined: int = 0) -> None:
        self._traffic = self._traffic.plus(dispatched, combined)

    @property
    def traffic(self) -> Traffic:
        """Bytes sent to other ranks, split sizes included."""
        return self._traffic

    def close(self) -> None:
        """Holds nothing; the process group stays its owner's."""


def destinations(spec: DispatchSpec, slots: Tensor) -> Tensor:
    """Which ranks each row of `slots [T, K]` needs: `[T, ranks]` bool; sliced experts need all of them."""
    here = slots >= 0
    if spec.sliced:
        return here.any(dim=1, keepdim=True).expand(-1, spec.ranks)
    rank = torch.where(here, slots // spec.slots, spec.ranks).long()  # the column past the last: nowhere
    marked = torch.zeros((slots.shape[0], spec.ranks + 1), dtype=torch.bool, device=slots.device)
    return marked.scatter_(1, rank, value=True)[:, : spec.ranks]


ENTRY = DispatchEntry(
    name="all2allv",
    build=AllToAllV,
    wires=ROW_WISE,
    grouping=Grouping.RAGGED,
    pace=Pace.HIGH_THROUGHPUT,
    archs=TORCH_ARCHS,
    buffer_bytes=lambda spec: 0,
    sliced=True,
    unequal=True,
    partial_sums=PARTIAL_SUMS,
    host_sync=True,
    verified=("cpu", "sm90"),
)
