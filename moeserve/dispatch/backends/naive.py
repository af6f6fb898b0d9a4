"""Every lane broadcasts its rows, and every owner broadcasts all its partial sums: the plain reference.

A step without some members is carried by messages between the others instead.
"""

from __future__ import annotations

from torch import Tensor

from moeserve.dispatch.backends.allgather_reducescatter import AllGatherReduceScatter
from moeserve.dispatch.dispatcher import DispatchEntry, Pace
from moeserve.dispatch.exchange import PARTIAL_SUMS, TORCH_ARCHS
from moeserve.dispatch.wire import ROW_WISE
from moeserve.experts.batch import Grouping


class Naive(AllGatherReduceScatter):
    """The dispatcher over a process group of the spec's members that judges the others."""

    def _gathered(self, mine: Tensor, lane_rows: tuple[int, ...]) -> Tensor:
        """Broadcasts lane after lane, where the step is of the whole group."""
        spec, exchange = self._spec, self._exchange
        if not exchange.whole(lane_rows):
            return super()._gathered(mine, lane_rows)
        arrived = mine.new_empty((sum(lane_rows), self._record.nbytes))
        lanes = arrived.split_with_sizes(exchange.lanes(lane_rows))
        lanes[spec.rank].copy_(mine)
        exchange.broadcast(lanes)
        self._traffic = self._traffic.plus(dispatched=mine.nbytes * (spec.ranks - 1))
        return arrived

    def _brought_home(self, partials: Tensor, lane_rows: tuple[int, ...]) -> list[Tensor]:
        """Broadcasts every owner's partial sums of all rows, where the step is of the whole group."""
        spec, exchange = self._spec, self._exchange
        if not exchange.whole(lane_rows):
            return super()._brought_home(partials, lane_rows)
        mine = exchange.by_position(partials, lane_rows)
        everyone = [
            mine if position == spec.rank else mine.new_empty((size, spec.hidden))
            for position, size in enumerate(exchange.owners(sum(lane_rows)))
        ]
        exchange.broadcast(everyone)
        self._traffic = self._traffic.plus(combined=mine.nbytes * (spec.ranks - 1))
        own = exchange.lanes(lane_rows)
        return [everyone[at].split_with_sizes(own)[spec.rank] for at in exchange.owner_positions]


ENTRY = DispatchEntry(
    name="naive",
    build=Naive,
    wires=ROW_WISE,
    grouping=Grouping.RAGGED,
    pace=Pace.ANY,
    archs=TORCH_ARCHS,
    buffer_bytes=lambda spec: 0,
    sliced=True,
    outlives=True,
    unequal=True,
    partial_sums=PARTIAL_SUMS,
    reference=True,
    verified=("cpu", "sm90"),
)
