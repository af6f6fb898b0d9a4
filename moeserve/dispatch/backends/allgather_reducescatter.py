"""Every owner gets every row, computes what its slots can, and sends each lane its partial sums.

Moves more bytes than a dispatcher that picks destinations, but all sizes are known from the step's header:
no counts are exchanged and, on a GPU, the host waits for nothing. At four ranks and top-8 a token reaches
3.6 ranks on average, so little is wasted. Both ways are one exchange of uneven pieces: lanes differ in
rows, and partial sums must be added in float32 and in owner order, which a reduce-scatter in the model's
dtype does not do.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from moeserve.dispatch.exchange import PARTIAL_SUMS, TORCH_ARCHS, Exchange, sum_partials
from moeserve.dispatch.permute import Homes, group_rows, no_rows, rounded, weigh_rows
from moeserve.dispatch.routing import Routing
from moeserve.dispatch.wire import ROW_WISE, WireRecord
from moeserve.experts.batch import Grouping


@dataclass(frozen=True, eq=False)
class GatherTicket:
    """What `combine` needs of `dispatch`."""

    homes: Homes
    lane_rows: tuple[int, ...]


class AllGatherReduceScatter(Dispatcher):
    """The dispatcher over a process group of the spec's members."""

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None) -> None:
        check_spec(spec)
        self._spec, self._exchange = spec, Exchange(spec, group)
        self._record = WireRecord(spec.wire, spec.hidden, spec.top_k)
        self._nothing = no_rows(spec)
        self._traffic = Traffic()

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """Sends this lane's rows to all owners and groups what arrived by slot."""
        spec, exchange = self._spec, self._exchange
        check_lane(spec, hidden, routing)
        lane_rows = exchange.begun(routing.lane_rows)
        batch, homes = self._nothing
        if exchange.idle(lane_rows):
            return Dispatched(batch, GatherTicket(homes, lane_rows))
        arrived = self._gathered(self._record.pack(hidden, routing), lane_rows)
        if not exchange.owns:
            return Dispatched(batch, GatherTicket(homes, lane_rows))
        tokens, slots, weights = self._record.unpack(exchange.by_lane(arrived, lane_rows))
        sizes = spec.slots_here, spec.row_align
        batch, homes = group_rows(tokens, local_slots(spec, slots), weights, sizes)
        return Dispatched(batch, GatherTicket(homes, lane_rows))

    def combine(self, outputs: Tensor, ticket: GatherTicket) -> Tensor:
        """Sends each lane its rows' partial sums, and adds up what comes for this one: `[T, H]`."""
        return self._combined(outputs, ticket, None)

    def combine_into(self, outputs: Tensor, ticket: GatherTicket, place: Tensor) -> Tensor:
        """The same, added up into `place`."""
        return self._combined(outputs, ticket, place)

    def _combined(self, outputs: Tensor, ticket: GatherTicket, place: Tensor | None) -> Tensor:
        partials = weigh_rows(outputs, ticket.homes, self._spec.dtype)
        if self._exchange.idle(ticket.lane_rows):
            return rounded(partials, self._spec.dtype, place)
        received = self._brought_home(partials, ticket.lane_rows)
        return rounded(sum_partials(received), self._spec.dtype, place)

    def _gathered(self, mine: Tensor, lane_rows: tuple[int, ...]) -> Tensor:
        """Sends `mine`, this lane's records, to every owner; returns those of all lanes, by position."""
        exchange = self._exchange
        arrived = mine.new_empty((sum(lane_rows) if exchange.owns else 0, self._record.nbytes))
        exchange.spread(arrived, mine, lane_rows)
        self._traffic = self._traffic.plus(dispatched=mine.nbytes * exchange.other_owners)
        return arrived

    def _brought_home(self, partials: Tensor, lane_rows: tuple[int, ...]) -> list[Tensor]:
        """Sends each lane its part of `partials`, by lane; returns what comes for this one, by owner."""
        spec, exchange = self._spec, self._exchange
        come = exchange.owners(spec.own_rows(lane_rows))
        go = exchange.lanes(lane_rows) if exchange.owns else [0] * spec.ranks
        received = partials.new_empty((sum(come), spec.hidden))
        exchange.carry(received, exchange.by_position(partials, lane_rows), (come, go), lane_rows)
        others = partials.shape[0] - go[spec.rank]
        self._traffic = self._traffic.plus(combined=others * spec.hidden * spec.dtype.itemsize)
        sums = received.split_with_sizes(come)
        return [sums[at] for at in exchange.owner_positions]

    @property
    def traffic(self) -> Traffic:
        """Bytes sent to other members."""
        return self._traffic

    def close(self) -> None:
        """Holds nothing; the process group stays its owner's."""


ENTRY = DispatchEntry(
    name="allgather_reducescatter",
    build=AllGatherReduceScatter,
    wires=ROW_WISE,
    grouping=Grouping.RAGGED,
    pace=Pace.ANY,
    archs=TORCH_ARCHS,
    buffer_bytes=lambda spec: 0,
    sliced=True,
    outlives=True,
    unequal=True,
    partial_sums=PARTIAL_SUMS,
    verified=("cpu", "sm90"),
)
