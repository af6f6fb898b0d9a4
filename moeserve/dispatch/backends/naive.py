"""Every lane broadcasts its rows, and every owner broadcasts all its partial sums: the plain reference.

A step without some members is carried by messages between the others instead.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from moeserve.dispatch.backends.allgather_reducescatter import GatherTicket
from moeserve.dispatch.checks import check_lane, check_spec, local_slots
from moeserve.dispatch.dispatcher import (
    Dispatched,
    DispatchEntry,
    Dispatcher,
    DispatchSpec,
    Pace,
    Traffic,
)
from moeserve.dispatch.exchange import PARTIAL_SUMS, TORCH_ARCHS, Exchange, sum_partials
from moeserve.dispatch.permute import group_rows, no_rows, weigh_rows
from moeserve.dispatch.routing import Routing
from moeserve.dispatch.wire import ROW_WISE, WireRecord
from moeserve.experts.batch import Grouping


class Naive(Dispatcher):
    """The dispatcher over a process group of the spec's members that judges the others."""

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None) -> None:
        check_spec(spec)
        self._spec, self._exchange = spec, Exchange(spec, group)
        self._record = WireRecord(spec.wire, spec.hidden, spec.top_k)
        self._nothing = no_rows(spec)
        self._traffic = Traffic()

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """Broadcasts lane after lane and groups the rows by slot."""
        spec, exchange = self._spec, self._exchange
        check_lane(spec, hidden, routing)
        lane_rows = exchange.begun(routing.lane_rows)
        if exchange.idle(lane_rows):
            return Dispatched(self._nothing[0], GatherTicket(self._nothing[1], lane_rows))
        mine = self._record.pack(hidden, routing)
        whole = exchange.whole(lane_rows)
        arrived = mine.new_empty((sum(lane_rows) if exchange.owns or whole else 0, self._record.nbytes))
        if whole:
            lanes = arrived.split_with_sizes(exchange.lanes(lane_rows))
            lanes[spec.rank].copy_(mine)
            exchange.broadcast(lanes)
        else:
            exchange.spread(arrived, mine, lane_rows)
        receivers = spec.ranks - 1 if whole else exchange.other_owners
        self._traffic = self._traffic.plus(dispatched=mine.nbytes * receivers)
        if not exchange.owns:
            return Dispatched(self._nothing[0], GatherTicket(self._nothing[1], lane_rows))
        tokens, slots, weights = self._record.unpack(exchange.by_lane(arrived, lane_rows))
        sizes = spec.slots_here, spec.row_align
        batch, homes = group_rows(tokens, local_slots(spec, slots), weights, sizes)
        return Dispatched(batch, GatherTicket(homes, lane_rows))

    def combine(self, outputs: Tensor, ticket: GatherTicket) -> Tensor:
        """Broadcasts every owner's partial sums of all rows; this lane adds up its own: `[T, H]`."""
        spec, lane_rows, exchange = self._spec, ticket.lane_rows, self._exchange
        mine = exchange.by_position(weigh_rows(outputs, ticket.homes, spec.dtype), lane_rows)
        if exchange.idle(lane_rows):
            return mine
        if not exchange.whole(lane_rows):
            return self._messaged(mine, lane_rows)
        rows, own = sum(lane_rows), exchange.lanes(lane_rows)
        everyone = [
            mine if position == spec.rank else mine.new_empty((size, spec.hidden))
            for position, size in enumerate(exchange.owners(rows))
        ]
        exchange.broadcast(everyone)
        self._traffic = self._traffic.plus(combined=mine.nbytes * (spec.ranks - 1))
        sums = [everyone[at].split_with_sizes(own)[spec.rank] for at in exchange.owner_positions]
        return sum_partials(sums).to(spec.dtype)

    def _messaged(self, mine: Tensor, lane_rows: tuple[int, ...]) -> Tensor:
        """Sends each lane its part of `mine`, partial sums by position; sums what comes for this one."""
        spec, exchange = self._spec, self._exchange
        come = exchange.owners(spec.own_rows(lane_rows))
        go = exchange.lanes(lane_rows) if exchange.owns else [0] * spec.ranks
        received = mine.new_empty((sum(come), spec.hidden))
        exchange.carry(received, mine, (come, go), lane_rows)
        others = mine.shape[0] - go[spec.rank]
        self._traffic = self._traffic.plus(combined=others * spec.hidden * spec.dtype.itemsize)
        sums = received.split_with_sizes(come)
        return sum_partials([sums[at] for at in exchange.owner_positions]).to(spec.dtype)

    @property
    def traffic(self) -> Traffic:
        """Bytes sent to other members, each receiver counted."""
        return self._traffic

    def close(self) -> None:
        """Holds nothing; the process group stays its owner's."""


ENTRY = DispatchEntry(
    name="naive",
    build=Naive,
    wires=ROW_WISE,
    grouping=Grouping.RAGGED,
    pace=Pace.ANY,
    archs=TORCH_ARCHS,
    buffer_bytes=lambda spec: 0,
    sliced=True,
    unequal=True,
    partial_sums=PARTIAL_SUMS,
    reference=True,
    verified=("cpu", "sm90"),
)
