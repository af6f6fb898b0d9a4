"""FlashInfer's two-sided all-to-all over NVLink: sender and receiver pass packets through queues of a pair.

One copy of a row travels to each rank that holds one of its slots, as the bytes of any row-wise wire; partial
sums travel back the same way and are added at home. The queues' size does not depend on the number of rows.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from math import inf
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from moeserve.dispatch.backends.flashinfer import joined, somewhere
from moeserve.dispatch.checks import local_slots
from moeserve.dispatch.dispatcher import DispatchEntry, DispatchSpec, Pace
from moeserve.dispatch.libraries.row_exchange import Arrived, RowExchange
from moeserve.dispatch.libraries.travel import presented
from moeserve.dispatch.limits import Limits
from moeserve.dispatch.routing import Routing
from moeserve.dispatch.wire import ROW_WISE, WireRecord
from moeserve.experts.batch import Grouping
from moeserve.experts.placement import EMPTY

IDS = 4  # of a rank, that it is addressed by: the library wants a multiple of 4 in all


class FlashInferTwoSided(RowExchange):
    """The dispatcher over `flashinfer.comm.trtllm_alltoall.MnnvlMoe`, whose queues all dispatchers share."""

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None) -> None:
        super().__init__(spec, group, ENTRY)
        self._record = WireRecord(spec.wire, spec.hidden, spec.top_k)
        self._row_bytes = self._record.nbytes
        self._library: Any = import_module("flashinfer.comm.trtllm_alltoall").MnnvlMoe
        mapping, memory = joined(spec, self._group)
        import_module("flashinfer.comm.mnnvl").MnnvlMemory.initialize()
        self._queues = self._library.get_moe_workspaces(mapping, memory)
        self._counters = self._library.get_moe_prepare_workspace(mapping, memory)

    def _send(self, hidden: Tensor, routing: Routing) -> Arrived:
        spec, rows = self._spec, max(routing.lane_rows)
        given, slots, weights = presented(hidden, routing)
        addressed = somewhere(spec, slots) // spec.slots * IDS
        ids = spec.ranks * IDS
        way, chosen, _, _ = self._library.mnnvl_moe_alltoallv_prepare_without_allgather(
            addressed, None, None, self._counters, rows, spec.rank, spec.ranks, ids, ids, spec.top_k
        )
        records = self._record.pack(given, replace(routing, slots=slots, weights=weights))
        received = self._library.mnnvl_moe_alltoallv(records, way, self._queues, spec.rank, spec.ranks)
        tokens, slots, weights = self._record.unpack(received)
        came = (chosen != ids).any(dim=1, keepdim=True)  # the library marks what is past the rows that came
        here = local_slots(spec, slots).where(came, EMPTY)
        return Arrived(tokens.parts, here, weights, (way, given.shape[0]))

    def _bring_home(self, partials: Tensor, handle: tuple[Any, int]) -> Tensor:
        """`handle` is the library's way back and how many rows were sent."""
        spec, (way, sent) = self._spec, handle
        total: Tensor = self._library.mnnvl_moe_alltoallv_combine(
            partials, way, self._queues, spec.rank, spec.ranks, spec.top_k, sent
        )
        return total

    def close(self) -> None:
        """Leaves the queues to the library, which keeps one set for the process."""


ENTRY = DispatchEntry(
    name="flashinfer_two_sided",
    build=FlashInferTwoSided,
    wires=ROW_WISE,
    grouping=Grouping.RAGGED,
    pace=Pace.ANY,
    archs=frozenset({"sm90", "sm100", "sm103"}),
    modules=frozenset({"flashinfer"}),
    max_lanes=64,
    max_owners=64,
    partial_sums="float32 sums of a rank travel in the hidden dtype and are added in float32, by choice",
    ordered=False,
    limits=Limits(top_k=32, hidden_multiple=8, one_host=True, waits=inf),
    verified=("sm90",),
)
