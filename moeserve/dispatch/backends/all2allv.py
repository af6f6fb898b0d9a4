"""One copy of a row for each owner that holds one of its slots, with ids and weights; one partial sum back.

Destinations depend on the routing, so split sizes are exchanged first and, on a GPU, read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from moeserve.dispatch.checks import check_lane, check_spec, local_slots
from moeserve.dispatch.dispatcher import (
    Dispatched,
    DispatchEntry,
    Dispatcher,
    DispatchSpec,
    Pace,
    Traffic,
)
from moeserve.dispatch.exchange import PARTIAL_SUMS, TORCH_ARCHS, Exchange
from moeserve.dispatch.permute import Homes, group_rows, no_rows, rounded, take_rows, weigh_rows
from moeserve.dispatch.routing import Routing
from moeserve.dispatch.wire import ROW_WISE, WireRecord
from moeserve.experts.batch import Grouping


@dataclass(frozen=True, eq=False)
class _CopiesTicket:
    homes: Homes
    lane_rows: tuple[int, ...]
    sent: list[int]  # copies for each position
    received: list[int]  # copies from each position
    copies: Tensor  # [N] int64: this lane's copies, row by row in owner order, by place among those sent
    starts: Tensor  # [T] int64: where each row's begin in `copies`


class AllToAllV(Dispatcher):
    """The dispatcher over a process group of the spec's members."""

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None) -> None:
        check_spec(spec)
        self._spec, self._exchange = spec, Exchange(spec, group)
        self._record = WireRecord(spec.wire, spec.hidden, spec.top_k)
        self._traffic = Traffic()
        none = torch.zeros(0, dtype=torch.int64, device=spec.device)
        self._nothing, homes = no_rows(spec)
        self._idle = _CopiesTicket(homes, (0,) * spec.members.max_lanes, [], [], none, none)
        owners = [member.owner for member in spec.members.present]
        self._owners = None  # the owner at every position, where that is not its position
        if owners != list(range(spec.ranks)):
            vacant = spec.members.max_owners  # of a column that no row needs
            at = [vacant if owner is None else owner for owner in owners]
            self._owners = torch.tensor(at, device=spec.device)
        self._ordered = torch.tensor(self._exchange.owner_positions, device=spec.device)

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """Sends each row once to every owner it needs and groups what arrived by slot."""
        spec, exchange = self._spec, self._exchange
        check_lane(spec, hidden, routing)
        lane_rows = exchange.begun(routing.lane_rows)
        if exchange.idle(lane_rows):
            return Dispatched(self._nothing, self._idle)
        bound = self._by_position(destinations(spec, routing.slots))  # [T, positions]
        sent, received = self._counts(bound, lane_rows)
        rows = bound.T.nonzero()[:, 1]  # by position, then by row
        outgoing = take_rows(self._record.pack(hidden, routing), rows)
        arrived = outgoing.new_empty((sum(received), self._record.nbytes))
        exchange.carry(arrived, outgoing, (received, sent), lane_rows)
        counted = 8 * exchange.other_owners
        self._count(dispatched=(sum(sent) - sent[spec.rank]) * self._record.nbytes + counted)
        tokens, slots, weights = self._record.unpack(exchange.runs_by_lane(arrived, received))
        sizes = spec.slots_here, spec.row_align
        batch, homes = group_rows(tokens, local_slots(spec, slots), weights, sizes)
        copies, starts = self._homecoming(bound)
        return Dispatched(batch, _CopiesTicket(homes, lane_rows, sent, received, copies, starts))

    def combine(self, outputs: Tensor, ticket: _CopiesTicket) -> Tensor:
        """Sends every copy's partial sum back, and adds up each row's, in owner order: `[T, H]`."""
        return self._combined(outputs, ticket, None)

    def combine_into(self, outputs: Tensor, ticket: _CopiesTicket, place: Tensor) -> Tensor:
        """The same, added up into `place`."""
        return self._combined(outputs, ticket, place)

    def _combined(self, outputs: Tensor, ticket: _CopiesTicket, place: Tensor | None) -> Tensor:
        spec, exchange = self._spec, self._exchange
        partials = weigh_rows(outputs, ticket.homes, spec.dtype)
        if ticket is self._idle:
            return rounded(partials, spec.dtype, place)
        back = partials.new_empty((sum(ticket.sent), spec.hidden))
        leaving = exchange.runs_by_position(partials, ticket.received)
        exchange.carry(back, leaving, (ticket.sent, ticket.received), ticket.lane_rows)
        others = sum(ticket.received) - ticket.received[spec.rank]
        self._count(combined=others * spec.hidden * spec.dtype.itemsize)
        if back.shape[0]:
            sums = F.embedding_bag(ticket.copies, back.float(), ticket.starts, mode="sum")
        else:
            sums = back.new_zeros((ticket.starts.shape[0], spec.hidden))
        return rounded(sums, spec.dtype, place)

    def _by_position(self, bound: Tensor) -> Tensor:
        """`bound [T, owners]` as `[T, positions]`: no row goes to a member that is no owner."""
        if self._owners is None:
            return bound[:, : self._spec.ranks]
        return F.pad(bound, (0, 1)).index_select(1, self._owners)

    def _homecoming(self, bound: Tensor) -> tuple[Tensor, Tensor]:
        """Where each row's partial sums stand among those that come back, in owner order, and begin."""
        place = bound.T.flatten().cumsum(0).view(bound.T.shape).T - 1  # [T, positions]
        taken = bound.sum(dim=1)
        if self._owners is not None:
            place, bound = (table.index_select(1, self._ordered) for table in (place, bound))
        return place[bound], taken.cumsum(0) - taken

    def _counts(self, bound: Tensor, lane_rows: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Copies this lane sends to each position, and those each position sends here."""
        sent = bound.sum(dim=0)
        received = self._exchange.counts(sent, lane_rows)
        counts: list[list[int]] = torch.stack((sent, received)).tolist()
        return counts[0], counts[1]

    def _count(self, dispatched: int = 0, combined: int = 0) -> None:
        self._traffic = self._traffic.plus(dispatched, combined)

    @property
    def traffic(self) -> Traffic:
        """Bytes sent to other members, split sizes included."""
        return self._traffic

    def close(self) -> None:
        """Holds nothing; the process group stays its owner's."""


def destinations(spec: DispatchSpec, slots: Tensor) -> Tensor:
    """Which owners each row of `slots [T, K]` needs: `[T, owners]` bool; sliced experts need all of them."""
    here, owners = slots >= 0, spec.members.max_owners
    if spec.sliced:
        return here.any(dim=1, keepdim=True).expand(-1, owners)
    owner = torch.where(here, slots // max(spec.slots, 1), owners).long()  # the column past the last: nowhere
    marked = torch.zeros((slots.shape[0], owners + 1), dtype=torch.bool, device=slots.device)
    return marked.scatter_(1, owner, value=True)[:, :owners]


ENTRY = DispatchEntry(
    name="all2allv",
    build=AllToAllV,
    wires=ROW_WISE,
    grouping=Grouping.RAGGED,
    pace=Pace.HIGH_THROUGHPUT,
    archs=TORCH_ARCHS,
    buffer_bytes=lambda spec: 0,
    sliced=True,
    outlives=True,
    unequal=True,
    partial_sums=PARTIAL_SUMS,
    host_sync=True,
    verified=("cpu", "sm90"),
)
