"""Every lane broadcasts its rows, and every rank broadcasts all its partial sums: the plain reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

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
from moeserve.dispatch.exchange import PARTIAL_SUMS, TORCH_ARCHS, check_group, sum_partials
from moeserve.dispatch.permute import group_rows, weigh_rows
from moeserve.dispatch.routing import Routing
from moeserve.dispatch.wire import ROW_WISE, WireRecord
from moeserve.experts.batch import Grouping


class Naive(Dispatcher):
    """The dispatcher over torch.distributed's default group that judges the others."""

    def __init__(self, spec: DispatchSpec) -> None:
        check_spec(spec)
        check_group(spec)
        self._spec = spec
        self._record = WireRecord(spec.wire, spec.hidden, spec.top_k)
        self._traffic = Traffic()

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """Broadcasts lane after lane and groups the rows by slot."""
        spec, lane_rows = self._spec, routing.lane_rows
        check_lane(spec, hidden, routing)
        mine = self._record.pack(hidden, routing)
        arrived = mine.new_empty((sum(lane_rows), self._record.nbytes))
        lanes = arrived.split_with_sizes(lane_rows)
        lanes[spec.rank].copy_(mine)
        _broadcast(lanes)
        self._traffic = self._traffic.plus(dispatched=mine.nbytes * (spec.ranks - 1))
        tokens, slots, weights = self._record.unpack(arrived)
        batch, homes = group_rows(tokens, local_slots(spec, slots), weights, (spec.slots, spec.row_align))
        return Dispatched(batch, GatherTicket(homes, lane_rows))

    def combine(self, outputs: Tensor, ticket: GatherTicket) -> Tensor:
        """Broadcasts every rank's partial sums of all rows; this lane adds up its own: `[T, H]`."""
        spec = self._spec
        mine = weigh_rows(outputs, ticket.homes, spec.dtype)
        everyone = [mine if rank == spec.rank else torch.empty_like(mine) for rank in range(spec.ranks)]
        _broadcast(everyone)
        self._traffic = self._traffic.plus(combined=mine.nbytes * (spec.ranks - 1))
        own = [partial.split_with_sizes(ticket.lane_rows)[spec.rank] for partial in everyone]
        return sum_partials(own).to(spec.dtype)

    @property
    def traffic(self) -> Traffic:
        """Bytes sent to other ranks, each receiver counted."""
        return self._traffic

    def close(self) -> None:
        """Holds nothing; the process group stays its owner's."""


def _broadcast(tensors: Sequence[Tensor]) -> None:
    """Broadcasts `tensors[r]` from each rank r."""
    for rank, tensor in enumerate(tensors):
        if tensor.numel():
            dist.broadcast(tensor, rank)


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
