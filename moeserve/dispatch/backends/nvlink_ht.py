"""Our own carrier for many tokens on one host: bulk copies into peer memory, expanded on arrival.

One copy a (token, rank) travels, quantized on the way out, in channels: runs of a lane's tokens that one warp
sends and one warp of each rank receives, a word telling how far it is. Counts go ahead of rows, so that
arrived rows are copied to their places in the batch while later ones travel. On the way home each rank sends
one weighted sum a row, and a lane adds up its ranks' sums as they come. Two launches, no host
synchronisation; epochs are counted on the device, so a captured graph replays.

Room is reused safely without a second buffer. A rank stores into a peer's channel only after the peer's word
that it has taken all of the epoch before (its credit), and a peer gives that word only after the channel's
last word of that epoch; so whoever waits always finds the word it waits for, and nobody meets the next
epoch's. A step that is abandoned between dispatch and combine leaves both in order: they are counted apart.

A peer that does not come within `patience` seconds is given up (peers/late.py): its counts and rows are
taken as none, and nobody hangs. Rows that it announced and did not send are undefined rows of their segments.

On the CPU a twin over shared memory keeps the same layout, words and rules; it serves only when named.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moeserve.dispatch.dispatcher import (
    Dispatched,
    Dispatcher,
    DispatchRow,
    DispatchSpec,
    Pace,
    Pending,
    Traffic,
)
from moeserve.dispatch.exchange import PARTIAL_SUMS, check_group
from moeserve.dispatch.lane import check_lane, check_spec
from moeserve.dispatch.limits import Limits
from moeserve.dispatch.peers.ht_kernels import Kernels
from moeserve.dispatch.peers.ht_layout import MOST_CHOICES, MOST_RANKS, Cut, Layout, cut_for
from moeserve.dispatch.peers.ht_twin import Twin
from moeserve.dispatch.peers.memory import PeerMemory
from moeserve.dispatch.peers.wires import SOURCES, RowRecord
from moeserve.dispatch.permute import row_capacity
from moeserve.dispatch.routing import Routing
from moeserve.dispatch.wire import ROW_WISE
from moeserve.experts.batch import ExpertBatch, Grouping


@dataclass(frozen=True, eq=False)
class _Ticket:
    slots: Tensor  # [T, K] int32 of this lane
    arrived: Tensor  # [ranks, channels] int32
    homes: Tensor  # [ranks, rank_rows, 1 + 2 K] int32
    capacity: int


class NvlinkHt(Dispatcher):
    """The carrier over peer memory of GPUs of one host."""

    counts_on_device = True

    def __init__(self, spec: DispatchSpec) -> None:
        check_spec(spec)
        check_group(spec)
        self._spec = spec
        cut, layout = plan_memory(spec)
        self._layout, self._record = layout, RowRecord(spec.wire, spec.hidden)
        self._memory = PeerMemory(layout.nbytes, spec.rank, spec.ranks, spec.device)
        self._kernels = Kernels(spec, cut, layout, self._memory)

    def dispatch(self, hidden: Tensor, routing: Routing) -> Pending[Dispatched]:
        """Sends each row once to every rank it needs, and expands what arrives in order of slots."""
        spec, layout, kernels = self._spec, self._layout, self._kernels
        check_lane(spec, hidden, routing)
        slots, weights = routing.slots.contiguous(), routing.weights.contiguous()
        rows = hidden.contiguous() if kernels.fused else self._record.pack(hidden)
        capacity = row_capacity(sum(routing.lane_rows), spec.top_k, spec.slots, spec.row_align)
        tokens = spec.wire.empty((capacity, spec.hidden), hidden.device)
        home_ints = 1 + 2 * spec.top_k
        sizes = (spec.slots, spec.slots + 1, spec.ranks * layout.channels)
        counts, offsets, arrived = slots.new_empty(sum(sizes)).split_with_sizes(sizes)
        homes = slots.new_empty((spec.ranks, layout.rank_rows, home_ints))
        kernels.dispatch(rows, slots, weights, tokens.parts, (counts, offsets, arrived, homes))
        batch = ExpertBatch(tokens, Grouping.RAGGED, counts, offsets)
        return Pending(lambda: Dispatched(batch, _Ticket(slots, arrived, homes, capacity)))

    def combine(self, outputs: Tensor, ticket: _Ticket) -> Pending[Tensor]:
        """Sends every row's weighted sum home, and adds up each token's, in rank order: `[T, H]`."""
        if list(outputs.shape) != [ticket.capacity, self._spec.hidden] or outputs.dtype not in SOURCES:
            raise ValueError(
                f"outputs must be [{ticket.capacity}, {self._spec.hidden}] in bfloat16, float16 or float32; "
                f"found {outputs.dtype} {list(outputs.shape)}"
            )
        answer = outputs.new_empty((ticket.slots.shape[0], self._spec.hidden), dtype=self._spec.dtype)
        self._kernels.combine(outputs.contiguous(), ticket.slots, (ticket.arrived, ticket.homes), answer)
        return Pending(lambda: answer)

    def exclude(self, ranks: Iterable[int]) -> None:
        """Gives `ranks` up before the next phase: they are neither waited for nor sent to."""
        self._kernels.attendance.exclude(ranks)

    def interrupt(self) -> None:
        """Waits for nobody any more, in the phase under way neither."""
        self._kernels.attendance.interrupt()

    def late(self) -> tuple[int, ...]:
        """Ranks given up since this was last asked, as far as the device has come."""
        return self._kernels.attendance.late()

    @property
    def traffic(self) -> Traffic:
        """Bytes of rows sent to other ranks, as far as the device has come."""
        dispatched, combined = self._kernels.sent_rows.tolist()
        return Traffic(dispatched * self._layout.row_bytes, combined * self._layout.answer_bytes)

    def close(self) -> None:
        """Frees this rank's memory, once the device has come so far, and unmaps the others'."""
        self._memory.close()


def plan_memory(spec: DispatchSpec) -> tuple[Cut, Layout]:
    """How every rank of the group works and lays out its memory, the smallest GPU deciding. Collective.

    Raises ValueError for sizes that the kernels have no room for.
    """
    own = torch.cuda.get_device_properties(torch.device(spec.device))
    shared_bytes = own.shared_memory_per_block_optin  # type: ignore[attr-defined]
    found: list[tuple[int, int]] = [(0, 0)] * spec.ranks
    dist.all_gather_object(found, (own.multi_processor_count, shared_bytes))
    processors, shared = (min(sizes) for sizes in zip(*found, strict=True))
    cut = cut_for(spec, processors, shared)
    return cut, Layout.of(spec, cut)


def build(spec: DispatchSpec) -> Dispatcher:
    """The carrier on GPUs, its twin on the CPU."""
    return Twin(spec) if spec.device == "cpu" else NvlinkHt(spec)


ROW = DispatchRow(
    name="nvlink_ht",
    build=build,
    wires=ROW_WISE,
    grouping=Grouping.RAGGED,
    pace=Pace.HIGH_THROUGHPUT,
    archs=frozenset(("cpu", "sm90", "sm100", "sm103")),
    in_flight=2,
    max_ranks=MOST_RANKS,
    sliced=True,
    limits=Limits(top_k=MOST_CHOICES, hidden_multiple=16, one_host=True),
    partial_sums=PARTIAL_SUMS,
    only_named=frozenset(("cpu",)),
    verified=("cpu", "sm90"),
)
