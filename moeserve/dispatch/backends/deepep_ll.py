"""DeepEP's low-latency kernels: each (row, slot) pair travels by itself into its slot's padded block.

The sender rounds rows to FP8 in the kernel that sends them. Experts' outputs come home one by one in bf16,
and the row's own rank weighs and adds them in float32. Two buffers alternate, so two batches may be on
their way.

The kernels drive RDMA queue pairs, within a host too: without an adapter DeepEP stops at a check of its own,
and only a build with that check lifted sends over NVLink alone. `verified` speaks of such a build, on four
H200 without adapters; over RDMA, which the entry asks for, it has not run.

It carries bf16 and FP8 with a scale for 128 elements. NVFP4 on the way out is in DeepEP's `hybrid-ep` branch
alone (`use_nvfp4`), neither in a release nor in its second generation, so there is no such wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from math import inf, lcm
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moeserve.dispatch.checks import check_equal, check_lane, check_spec
from moeserve.dispatch.dispatcher import (
    Dispatched,
    DispatchEntry,
    Dispatcher,
    DispatchSpec,
    Pace,
    Traffic,
)
from moeserve.dispatch.exchange import check_group
from moeserve.dispatch.libraries.probe import probe
from moeserve.dispatch.libraries.travel import cropped, parts_arrived, presented, widened
from moeserve.dispatch.limits import Limits
from moeserve.dispatch.routing import Routing
from moeserve.experts.batch import ExpertBatch, Grouping
from moeserve.quant.format import Packed

HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
FP8 = frozenset({"fp8_group128", "fp8_group128_ue8m0"})
_ROWS_STEP = 4  # a slot's block is whole steps of it, for tensor copies of scales


@dataclass(frozen=True, eq=False)
class _PaddedTicket:
    slots: Tensor  # [T or 1, K] int64, as dispatched
    weights: Tensor  # [T or 1, K] float32
    handle: Any
    own: int  # rows of this lane


class LowLatency(Dispatcher):
    """Dispatches over a buffer with `low_latency_dispatch` and `low_latency_combine` of `entry`'s library."""

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None, entry: DispatchEntry) -> None:
        check_spec(spec)
        check_equal(spec, entry.name)
        self._group = check_group(spec, group)
        probe(entry, spec, self._group)
        self._spec = spec
        self._travelling = entry.limits.travelling(spec.hidden)
        self._rows = most_rows(spec)
        self._traffic = Traffic()
        self._buffer = self._opened()

    def _opened(self) -> Any:
        """The library's buffer, joined with all ranks. Collective."""
        Buffer: Any = import_module("deep_ep").Buffer
        spec = self._spec
        slots = spec.ranks * spec.slots
        nbytes = Buffer.get_low_latency_rdma_size_hint(self._rows, self._travelling, spec.ranks, slots)
        return Buffer(
            self._group,
            num_rdma_bytes=nbytes,
            low_latency_mode=True,
            num_qps_per_rank=spec.slots,
            explicitly_destroy=True,
        )

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """Sends each row to each of its slots, rounded to the wire on the way: `[e, C, H]`."""
        spec = self._spec
        check_lane(spec, hidden, routing)
        rows, slots, weights = presented(hidden, routing)
        ids, fp8 = slots.to(self._id_dtype()), spec.wire.name in FP8
        received, counts, handle, _, _ = self._buffer.low_latency_dispatch(
            widened(rows, self._travelling),
            ids,
            self._rows,
            spec.ranks * spec.slots,
            use_fp8=fp8,
            round_scale=spec.wire.name.endswith("ue8m0"),
        )
        parts = parts_arrived(received if fp8 else (received,), spec)
        capacity = spec.ranks * self._rows
        tokens = Packed(
            spec.wire,
            torch.Size((spec.slots, capacity, spec.hidden)),
            tuple(part.contiguous() for part in parts),
        )
        offsets = torch.arange(spec.slots + 1, dtype=torch.int32, device=counts.device) * capacity
        batch = ExpertBatch(tokens, Grouping.PADDED, counts, offsets)
        sent = hidden.shape[0] * spec.top_k * spec.wire.nbytes((1, self._travelling))
        self._traffic = self._traffic.plus(dispatched=sent)
        ticket = _PaddedTicket(ids, weights, handle, hidden.shape[0])
        return Dispatched(batch, ticket)

    def combine(self, outputs: Tensor, ticket: _PaddedTicket) -> Tensor:
        """Sends outputs `[e, C, H]` home pair by pair, where they are weighed and added: `[T, H]`."""
        spec, capacity = self._spec, self._spec.ranks * self._rows
        wide = widened(outputs.reshape(spec.slots * capacity, spec.hidden), self._travelling)
        total, _, _ = self._buffer.low_latency_combine(
            wide.view(spec.slots, capacity, self._travelling), ticket.slots, ticket.weights, ticket.handle
        )
        answer = cropped(total[: ticket.own], spec.hidden).contiguous()
        received = ticket.own * spec.top_k * self._travelling * spec.dtype.itemsize
        self._traffic = self._traffic.plus(combined=received)
        return answer

    def _id_dtype(self) -> torch.dtype:
        return torch.int64

    @property
    def traffic(self) -> Traffic:
        """Bytes sent, counting every pair as if its slot were another rank's."""
        return self._traffic

    def close(self) -> None:
        """Frees the library's buffer."""
        self._buffer.destroy()


class DeepEPLowLatency(LowLatency):
    """Dispatches over `deep_ep.Buffer` in its low-latency mode."""

    def __init__(self, spec: DispatchSpec, group: ProcessGroup | None) -> None:
        super().__init__(spec, group, ENTRY)


def most_rows(spec: DispatchSpec) -> int:
    """Rows a lane has places for: `lane_rows` or a few more, so that a slot's block is whole steps of 4 and
    of the kernel's alignment."""
    rows, step = max(spec.lane_rows, 1), lcm(_ROWS_STEP, spec.row_align)
    while rows * spec.ranks % step:
        rows += 1
    return rows


ENTRY = DispatchEntry(
    name="deepep_ll",
    build=DeepEPLowLatency,
    wires=frozenset({"bf16"}) | FP8,
    grouping=Grouping.PADDED,
    pace=Pace.LOW_LATENCY,
    archs=frozenset({"sm90", "sm100", "sm103"}),
    in_flight=2,
    modules=frozenset({"deep_ep"}),
    partial_sums="outputs of experts travel in bf16 and are weighed and added in float32 at home",
    ordered=False,
    quantizes=True,
    limits=Limits(dtypes=frozenset({"bf16"}), top_k=11, hidden_sizes=HIDDEN_SIZES, rdma=True, waits=inf),
    verified=("sm90",),
)
