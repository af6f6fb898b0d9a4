"""FlashInfer's two-sided all-to-all over NVLink: sender and receiver pass packets through queues of a pair.

One copy of a row travels to each rank that holds one of its slots, as the bytes of any row-wise wire; partial
sums travel back the same way and are added at home. The queues' size does not depend on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from moeserve.dispatch.backends.flashinfer import joined, somewhere
from moeserve.dispatch.dispatcher import (
    Dispatched,
    Dispatcher,
    DispatchRow,
    DispatchSpec,
    Pace,
    Pending,
    Traffic,
)
from moeserve.dispatch.exchange import check_group
from moeserve.dispatch.lane import check_lane, check_spec, local_slots
from moeserve.dispatch.limits import Limits
from moeserve.dispatch.permute import Homes, weigh_rows
from moeserve.dispatch.probe import probe
from moeserve.dispatch.routing import Routing
from moeserve.dispatch.travel import grouped, most_copies, nobody, presented
from moeserve.dispatch.wire import ROW_WISE, Record
from moeserve.experts.batch import Grouping
from moeserve.experts.placement import EMPTY

IDS = 4  # of a rank, that it is addressed by: the library wants a multiple of 4 in all


@dataclass(frozen=True, eq=False)
class _Ticket:
    homes: Homes
    way: Any  # the library's, for the way home; None where no lane brought a row
    sent: int  # rows presented
    own: int  # rows of this lane


class FlashInferTwoSided(Dispatcher):
    """The carrier over `flashinfer.comm.trtllm_alltoall.MnnvlMoe`, whose queues all carriers share."""

    def __init__(self, spec: DispatchSpec) -> None:
        check_spec(spec)
        check_group(spec)
        probe(ROW, spec)
        self._spec = spec
        self._record = Record(spec.wire, spec.hidden, spec.top_k)
        self._library: Any = import_module("flashinfer.comm.trtllm_alltoall").MnnvlMoe
        mapping, memory = joined(spec)
        import_module("flashinfer.comm.mnnvl").MnnvlMemory.initialize()
        self._queues = self._library.get_moe_workspaces(mapping, memory)
        self._counters = self._library.get_moe_prepare_workspace(mapping, memory)
        self._traffic = Traffic()

    def dispatch(self, hidden: Tensor, routing: Routing) -> Pending[Dispatched]:
        """Tells every rank how many rows come, sends them with slots and weights, and groups those here."""
        spec = self._spec
        check_lane(spec, hidden, routing)
        rows = max(routing.lane_rows)
        if not rows:
            arrived = nobody(spec, hidden)
            return Pending(lambda: Dispatched(arrived.batch, _Ticket(arrived.ticket, None, 0, 0)))
        given, slots, weights = presented(hidden, routing)
        addressed = somewhere(spec, slots) // spec.slots * IDS
        ids = spec.ranks * IDS
        way, chosen, _, _ = self._library.mnnvl_moe_alltoallv_prepare_without_allgather(
            addressed, None, None, self._counters, rows, spec.rank, spec.ranks, ids, ids, spec.top_k
        )
        records = self._record.pack(given, Routing(slots, weights, routing.lane_rows))
        received = self._library.mnnvl_moe_alltoallv(records, way, self._queues, spec.rank, spec.ranks)
        tokens, slots, weights = self._record.unpack(received)
        came = (chosen != ids).any(dim=1, keepdim=True)  # the library marks what is past the rows that came
        batch, homes = grouped(spec, tokens, local_slots(spec, slots).where(came, EMPTY), weights)
        sent = most_copies(spec, routing) * self._record.nbytes
        self._traffic = self._traffic.plus(dispatched=sent)
        ticket = _Ticket(homes, way, given.shape[0], hidden.shape[0])
        return Pending(lambda: Dispatched(batch, ticket))

    def combine(self, outputs: Tensor, ticket: _Ticket) -> Pending[Tensor]:
        """Sends this rank's weighted sums to the rows' own ranks, and adds up this lane's: `[T, H]`."""
        spec = self._spec
        partials = weigh_rows(outputs, ticket.homes, spec.dtype)
        if ticket.way is None:
            return Pending(lambda: partials)
        total: Tensor = self._library.mnnvl_moe_alltoallv_combine(
            partials, ticket.way, self._queues, spec.rank, spec.ranks, spec.top_k, ticket.sent
        )
        received = ticket.own * min(spec.top_k, spec.ranks - 1) * spec.hidden * spec.dtype.itemsize
        self._traffic = self._traffic.plus(combined=received)
        return Pending(lambda: total[: ticket.own])

    @property
    def traffic(self) -> Traffic:
        """Bytes moved between ranks, counting every row once for each rank it may need."""
        return self._traffic

    def close(self) -> None:
        """Leaves the queues to the library, which keeps one set for the process."""


ROW = DispatchRow(
    name="flashinfer_two_sided",
    build=FlashInferTwoSided,
    wires=ROW_WISE,
    grouping=Grouping.RAGGED,
    pace=Pace.ANY,
    archs=frozenset({"sm90", "sm100", "sm103"}),
    modules=frozenset({"flashinfer"}),
    max_ranks=64,
    partial_sums="float32 sums of a rank travel in the hidden dtype and are added in float32, by choice",
    ordered=False,
    limits=Limits(top_k=32, hidden_multiple=8, one_host=True),
)
