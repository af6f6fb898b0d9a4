"""The low-latency carrier's phases on a GPU: one kernel each, launched without a look at the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.peers.late import Attendance
from moeserve.dispatch.peers.ll_layout import LowLatencyLayout
from moeserve.dispatch.peers.memory import PeerMemory
from moeserve.dispatch.peers.sources import source
from moeserve.dispatch.peers.wires import wire_code
from moeserve.dispatch.routing import Routing
from moeserve.experts.nvrtc import U64, Argument, Program
from moeserve.quant.format import Packed

SOURCES = ("ll_shared.cu", "ll_dispatch.cu", "ll_combine.cu")
THREADS = 512
MOST_LANE_ROWS = 0xFFFF
MOST_RANKS = 8
"""Rows of each lane go to a kernel as 16 bits in two words."""


@dataclass(frozen=True, eq=False)
class Arrived:
    """What a dispatch leaves for the batch and for the way home."""

    tokens: Packed  # [e, C, H]
    counts: Tensor  # [e] int32
    places: Tensor  # [N, K] int32 row of [e * C] of each arrived choice, -1: not here; N rows of all lanes
    weights: Tensor  # [N, K] float32, meaningless where the place is -1
    epoch: Tensor  # [1] int32


class LowLatencyKernels:
    """Both phases over `memory`. Buffers a caller gets are new each time, and belong to the caller."""

    def __init__(
        self, spec: DispatchSpec, layout: LowLatencyLayout, memory: PeerMemory, attendance: Attendance
    ) -> None:
        self._spec, self._layout, self._memory, self._attendance = spec, layout, memory, attendance
        self._wire = wire_code(spec)
        program = Program(source(*SOURCES), (*self._wire.options, f"-DTOP_K={spec.top_k}"))
        self._dispatch, self._combine = program.function("ll_dispatch"), program.function("ll_combine")
        self._combine_small = program.function("ll_combine_small")
        self._shared = layout.record.nbytes + 4 * spec.slots
        self._blocks = torch.cuda.get_device_properties(spec.device).multi_processor_count
        if not self._wire.fused:  # what a format keeps on the device is brought there now
            layout.record.pack(torch.zeros((1, spec.hidden), dtype=spec.dtype, device=spec.device))
        self._state = torch.zeros(2, dtype=torch.int32, device=spec.device)
        self._patience = U64(int(spec.patience * 1e9))

    def dispatch(self, hidden: Tensor, routing: Routing) -> Arrived:
        """Sends this lane's rows and groups what arrives."""
        spec, layout = self._spec, self._layout
        rows, arrived = sum(routing.lane_rows), self._arrival(sum(routing.lane_rows))
        if self._wire.fused:
            sent, row_bytes = hidden.contiguous(), spec.hidden * spec.dtype.itemsize
        else:
            sent, row_bytes = layout.record.pack(hidden), layout.record.nbytes
        none = arrived.counts
        args: list[Argument] = [
            self._memory.pointers,
            self._state,
            *self._attendance.words(),
            self._patience,
            spec.rank,
            U64(layout.greetings),
            U64(layout.choices),
            U64(layout.ready),
            U64(layout.records),
            U64(layout.parity_bytes),
            spec.lane_rows,
            *_lanes(routing.lane_rows),
            0 if spec.sliced else spec.rank * spec.slots,
            spec.slots,
            layout.capacity,
            int(spec.sliced),
            sent,
            row_bytes,
            routing.slots.contiguous(),
            routing.weights.contiguous(),
            self._wire.factor,
            *(*arrived.tokens.parts, none, none)[:3],
            arrived.counts,
            arrived.places,
            arrived.weights,
            arrived.epoch,
        ]
        blocks = min(self._blocks, max(1, rows + routing.lane_rows[spec.rank]))
        self._dispatch.launch(blocks, THREADS, args, shared=self._shared)
        return arrived

    def combine(self, outputs: Tensor, arrived: Arrived, routing: Routing) -> Tensor:
        """Sends weighted partial sums of `outputs [e * C, H]` home, and adds up this lane's: `[T, H]`."""
        spec, layout = self._spec, self._layout
        own, rows = routing.lane_rows[spec.rank], sum(routing.lane_rows)
        answer = outputs.new_empty((own, spec.hidden))
        if small := max(routing.lane_rows) <= layout.small_rows:
            where = [U64(layout.sealed)]
        else:
            where = [U64(layout.returned), U64(layout.partials)]
        args: list[Argument] = [
            self._memory.pointers,
            *self._attendance.words(),
            self._patience,
            spec.rank,
            *where,
            U64(layout.parity_bytes),
            layout.small_rows if small else spec.lane_rows,
            *_lanes(routing.lane_rows),
            spec.slots,
            int(spec.sliced),
            outputs.contiguous(),
            arrived.places,
            arrived.weights,
            arrived.epoch,
            routing.slots.contiguous(),
            answer,
        ]
        kernel = self._combine_small if small else self._combine
        kernel.launch(min(self._blocks, max(1, rows * layout.spans)), THREADS, args)
        return answer

    def _arrival(self, rows: int) -> Arrived:
        spec, device = self._spec, self._spec.device
        return Arrived(
            spec.wire.empty((spec.slots, self._layout.capacity, spec.hidden), device),
            torch.empty(spec.slots, dtype=torch.int32, device=device),
            torch.empty((rows, spec.top_k), dtype=torch.int32, device=device),
            torch.empty((rows, spec.top_k), dtype=torch.float32, device=device),
            torch.empty(1, dtype=torch.int32, device=device),
        )


def _lanes(lane_rows: tuple[int, ...]) -> tuple[U64, U64]:
    """The rows that each lane brings, 16 bits a rank."""
    words = [0, 0]
    for rank, rows in enumerate(lane_rows):
        words[rank // 4] |= rows << 16 * (rank % 4)
    return U64(words[0]), U64(words[1])
