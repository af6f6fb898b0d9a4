"""The high-throughput carrier's two kernels, compiled for a spec: `Kernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.peers.ht_layout import PIECE_BYTES, Cut, Layout
from moeserve.dispatch.peers.late import Attendance
from moeserve.dispatch.peers.memory import PeerMemory
from moeserve.dispatch.peers.sources import source
from moeserve.dispatch.peers.wires import SOURCES, wire_code
from moeserve.experts.nvrtc import U64, Argument, Function, Program

DISPATCH = ("ht_shared.cu", "ht_batch.cu", "ht_send.cu", "ht_receive.cu", "ht_dispatch.cu")
COMBINE = ("ht_shared.cu", "ht_combine.cu")
"""Files of each kernel's source, after common.cu."""

DEPTH = 2  # records that a sending warp holds
STAGES = 3  # pieces that a warp of combine holds
STATE_WORDS = 8  # epochs, counters; then bases [ranks, slots] int32
NANOSECONDS = 10**9


class Kernels:
    """Dispatch and combine of one rank over `memory`, as two launches that read nothing on the host."""

    def __init__(self, spec: DispatchSpec, cut: Cut, layout: Layout, memory: PeerMemory) -> None:
        self._spec, self._cut, self._layout, self._memory = spec, cut, layout, memory
        self._wire = wire_code(spec)
        self.attendance = Attendance(spec.ranks, spec.device)
        bases = spec.ranks * spec.slots
        self._state = torch.zeros(STATE_WORDS + -(-bases // 2), dtype=torch.int64, device=spec.device)
        self.sent_rows = torch.zeros(2, dtype=torch.int64, pin_memory=True)  # by dispatch, by combine
        self._options = (*self._wire.options, *_options(spec, cut, layout))
        self._dispatch = Program(source(*DISPATCH), self._options).function("ht_dispatch")
        self._combines: dict[torch.dtype, Function] = {}
        self._combine(spec.dtype)

    @property
    def fused(self) -> bool:
        """Whether dispatch takes hidden states; else it takes records."""
        return self._wire.fused

    def dispatch(
        self,
        rows: Tensor,
        slots: Tensor,
        weights: Tensor,
        parts: tuple[Tensor, ...],
        marks: tuple[Tensor, ...],
    ) -> None:
        """Queues dispatch: `rows [T, ...]`, `slots [T, K]`, `weights [T, K]` to all ranks' batches.

        `parts` are this rank's batch; `marks` are its counts `[e]` and offsets `[e + 1]`, rows that arrived
        by channel `[ranks, channels]`, and their homes `[ranks, rank_rows, 1 + 2 K]`; all int32.
        """
        cut, stride = self._cut, self._layout.row_stride
        three = (*parts, *parts[:1] * (3 - len(parts)))
        self._dispatch.launch(
            cut.blocks + 1,
            32 * (cut.senders + cut.receivers),
            (
                *self._common(),
                rows,
                self._wire.factor,
                slots,
                weights,
                slots.shape[0],
                *three,
                *marks,
                self.sent_rows[:1],
            ),
            shared=(DEPTH * cut.senders + cut.ring * cut.receivers) * stride,
        )

    def combine(self, outputs: Tensor, slots: Tensor, marks: tuple[Tensor, Tensor], answer: Tensor) -> None:
        """Queues combine: `outputs [capacity, H]` home to all ranks' `answer [T, H]`.

        `slots` are those of dispatch, `marks` its rows that arrived and their homes.
        """
        cut, lanes = self._cut, self._cut.senders * self._cut.split
        self._combine(outputs.dtype).launch(
            cut.blocks,
            32 * lanes * 3 // 2,
            (*self._common(), outputs, slots, slots.shape[0], *marks, answer, self.sent_rows[1:]),
            shared=STAGES * PIECE_BYTES * lanes,
        )

    def _common(self) -> tuple[Argument, ...]:
        peers = self.attendance
        patience = U64(round(self._spec.patience * NANOSECONDS))
        return (self._memory.pointers, peers.live, peers.board, self._state, self._spec.rank, patience)

    def _combine(self, dtype: torch.dtype) -> Function:
        """Combine for outputs of `dtype`, compiled when first asked for."""
        if dtype not in self._combines:
            options = (*self._options, f"-DOUTPUT={SOURCES[dtype]}")
            self._combines[dtype] = Program(source(*COMBINE), options).function("ht_combine")
        return self._combines[dtype]


def _options(spec: DispatchSpec, cut: Cut, layout: Layout) -> list[str]:
    """What the ht sources are given besides common.cu's options."""
    numbers = {
        "SLOTS": spec.slots,
        "TOP_K": spec.top_k,
        "ROW_ALIGN": spec.row_align,
        "SLICED": int(spec.sliced),
        "CHANNELS": layout.channels,
        "CHANNEL_ROWS": layout.channel_rows,
        "ROW_STRIDE": layout.row_stride,
        "SENDERS": cut.senders,
        "RECEIVERS": cut.receivers,
        "RING": cut.ring,
        "SPLIT": cut.split,
    }
    starts = [f"-D{name}_AT={start}ull" for name, start in layout.starts.items()]
    return [*(f"-D{name}={number}" for name, number in numbers.items()), *starts]
