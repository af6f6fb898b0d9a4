"""Every rank gets every row, computes what its slots can, and sends each lane its partial sums.

Moves more bytes than a dispatcher that picks destinations, but all sizes are known from the step's header:
no counts are exchanged and, on a GPU, the host waits for nothing. At four ranks and top-8 a token reaches
3.6 ranks on average, so little is wasted. Both ways are one exchange of uneven pieces: lanes differ in
rows, and partial sums must be added in float32 and in rank order, which a reduce-scatter in the model's
dtype does not do.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from moeserve.dispatch.exchange import PARTIAL_SUMS, TORCH_ARCHS, check_group, exchange, spread, sum_partials
from moeserve.dispatch.permute import Homes, group_rows, weigh_rows
from moeserve.dispatch.routing import Routing
from moeserve.dispatch.wire import ROW_WISE, WireRecord
from moeserve.experts.batch import Grouping


@dataclass(frozen=True, eq=False)
class GatherTicket:
    """What `combine` needs of `dispatch`."""

    homes: Homes
    lane_rows: tuple[int, ...]


class AllGatherReduceScatter(Dispatcher):
    """The dispatcher over torch.distributed's default group."""

    def __init__(self, spec: DispatchSpec) -> None:
        check_spec(spec)
        check_group(spec)
        self._spec = spec
        self._record = WireRecord(spec.wire, spec.hidden, spec.top_k)
        self._traffic = Traffic()

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """Sends this lane's rows to all ranks and groups what arrived by slot."""
        spec, lane_rows = self._spec, routing.lane_rows
        check_lane(spec, hidden, routing)
        mine = self._record.pack(hidden, routing)
        arrived = mine.new_empty((sum(lane_rows), self._record.nbytes))
        spread(arrived, mine, lane_rows)
        self._traffic = self._traffic.plus(dispatched=mine.nbytes * (spec.ranks - 1))
        tokens, slots, weights = self._record.unpack(arrived)
        batch, homes = group_rows(tokens, local_slots(spec, slots), weights, (spec.slots, spec.row_align))
        return Dispatched(batch, GatherTicket(homes, lane_rows))

    def combine(self, outputs: Tensor, ticket: GatherTicket) -> Tensor:
        """Sends each lane its rows' partial sums, and adds up what comes for this one: `[T, H]`."""
        spec, own = self._spec, ticket.lane_rows[self._spec.rank]
        partials = weigh_rows(outputs, ticket.homes, spec.dtype)
        received = partials.new_empty((spec.ranks * own, spec.hidden))
        exchange(received, partials, [own] * spec.ranks, ticket.lane_rows)
        others = partials.shape[0] - own
        self._traffic = self._traffic.plus(combined=others * spec.hidden * spec.dtype.itemsize)
        return sum_partials(received.view(spec.ranks, own, spec.hidden).unbind()).to(spec.dtype)

    @property
    def traffic(self) -> Traffic:
        """Bytes sent to other ranks."""
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
    unequal=True,
    partial_sums=PARTIAL_SUMS,
    verified=("cpu", "sm90"),
)
