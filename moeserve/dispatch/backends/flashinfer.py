"""FlashInfer's one-sided all-to-all over NVLink: ranks store into each other's workspace, and read from it.

One copy of a row travels to each rank that holds one of its slots, as the bytes of any row-wise wire. On the
way home each rank's weighted partial sum is read by the row's own rank, which adds them in float32.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from moeserve.dispatch.checks import local_slots
from moeserve.dispatch.dispatcher import DispatchEntry, DispatchSpec, Pace
from moeserve.dispatch.libraries.flashinfer_ranks import FlashInferRanks
from moeserve.dispatch.libraries.row_exchange import Arrived, RowExchange
from moeserve.dispatch.limits import Limits
from moeserve.dispatch.routing import Routing
from moeserve.dispatch.wire import ROW_WISE, WireRecord
from moeserve.experts.batch import Grouping
from moeserve.experts.placement import EMPTY

TOP_K = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)
"""Choices a row that it has kernels for; a row with fewer repeats its first."""


class FlashInfer(RowExchange):
    """The dispatcher over `flashinfer.comm.MoeAlltoAll`.

    Every lane has places for `lane_rows` rows, however few a step brings: so arriving rows and sums that are
    read never share a byte, when a rank that is done with one step starts on a larger one.

    The library keeps workspaces by size for the life of the process, so dispatchers of the same sizes share
    one and none is freed by `close`.
    """

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None) -> None:
        super().__init__(spec, group, ENTRY)
        self._record = WireRecord(spec.wire, spec.hidden, spec.top_k)
        self._top_k = next(k for k in TOP_K if k >= spec.top_k)
        self._row_bytes = self._record.nbytes + self._top_k * torch.int32.itemsize
        self._exchange = _opened(spec, self._group, (self._row_bytes, self._top_k))

    def _send(self, hidden: Tensor, routing: Routing) -> Arrived:
        spec, rows = self._spec, max(routing.lane_rows)
        ids = F.pad(routing.slots, (0, self._top_k - spec.top_k), value=EMPTY)
        records, slots = self._exchange.dispatch(
            somewhere(spec, ids),
            [self._record.pack(hidden, routing), ids],
            spec.lane_rows,
            invalid_token_expert_id=EMPTY,
            expert_id_payload_index=1,
        )
        tokens, _, weights = self._record.unpack(records[:, :rows].flatten(0, 1))
        here = local_slots(spec, slots[:, :rows, : spec.top_k].flatten(0, 1))
        return Arrived(tokens.parts, here, weights, rows)

    def _bring_home(self, partials: Tensor, handle: int) -> Tensor:
        """`handle` is the number of rows of the fullest lane."""
        spec = self._spec
        payload = self._exchange.get_combine_payload_tensor_in_workspace(
            spec.lane_rows, spec.hidden, spec.dtype
        )
        payload[:, :handle] = partials.view(spec.ranks, handle, spec.hidden)
        total: Tensor = self._exchange.combine(payload, spec.lane_rows, payload_in_workspace=True)
        return total

    def close(self) -> None:
        """Leaves the workspace to the library, which hands it to the next dispatcher of its size."""


def _opened(spec: DispatchSpec, group: ProcessGroup, row: tuple[int, int]) -> Any:
    """The library's object, with a workspace for `lane_rows` rows from each rank. Collective.

    `row` is (bytes of a row, its choices).
    """
    nbytes, top_k = row
    library: Any = import_module("flashinfer.comm.trtllm_moe_alltoall")
    size = library.moe_a2a_get_workspace_size_per_rank(
        ep_size=spec.ranks,
        max_num_tokens=spec.lane_rows,
        total_dispatch_payload_size_per_token=nbytes,
        combine_payload_size_per_token=spec.hidden * spec.dtype.itemsize,
    )
    mapping, memory = joined(spec, group)
    return library.MoeAlltoAll(
        mapping,
        max_num_tokens=spec.lane_rows,
        top_k=top_k,
        num_experts=spec.ranks * spec.slots,
        workspace_size_per_rank=size,
        mnnvl_config=memory,
    )


def joined(spec: DispatchSpec, group: ProcessGroup) -> tuple[Any, Any]:
    """The ranks' mapping, and through what ranks exchange handles of memory, as the library takes them."""
    mapping = import_module("flashinfer.comm.mapping").Mapping(
        world_size=spec.ranks,
        rank=spec.rank,
        gpus_per_node=spec.ranks,
        tp_size=spec.ranks,
        moe_ep_size=spec.ranks,
        moe_tp_size=1,
    )
    return mapping, import_module("flashinfer.comm.mnnvl").MnnvlConfig(comm_backend=FlashInferRanks(group))


def somewhere(spec: DispatchSpec, slots: Tensor) -> Tensor:
    """Slots with none left out, as the library needs them: a place that chooses nothing repeats the row's
    largest, which costs no copy, and a row that chooses nothing stays here."""
    home = spec.rank * spec.slots
    any_of = slots.amax(dim=1, keepdim=True)
    return torch.where(slots >= 0, slots, torch.where(any_of >= 0, any_of, home))


ENTRY = DispatchEntry(
    name="flashinfer",
    build=FlashInfer,
    wires=ROW_WISE,
    grouping=Grouping.RAGGED,
    pace=Pace.ANY,
    archs=frozenset({"sm90", "sm100", "sm103"}),
    modules=frozenset({"flashinfer"}),
    max_lanes=64,
    max_owners=64,
    partial_sums="float32 sums of a rank travel in the hidden dtype and are added in float32, pair by pair",
    ordered=False,
    limits=Limits(top_k=TOP_K[-1], one_host=True, waits=300.0),
    verified=("sm90",),
)
