"""Low latency over peer memory: ranks of one host store straight into one another's, and no host waits.

A row goes once to each rank that needs it, quantized on the way out; its choices go to all ranks. Each rank
places what arrives by slot, PADDED, so that no count is exchanged before. On the way home a rank adds up its
own experts' weighted outputs of a row in float32, and stores that one partial sum into the row's home. Both
phases are one kernel, for a CUDA graph too; two steps can be under way.

A peer that does not come within `spec.patience` seconds is given up: named by `late`, its rows count as
none, and the step goes on. On a CPU the same protocol runs over shared memory, for tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.dispatch.backends.all2allv import destinations
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
from moeserve.dispatch.peers.epochs import BUFFERS
from moeserve.dispatch.peers.late import Attendance
from moeserve.dispatch.peers.ll_kernels import MOST_LANE_ROWS, MOST_RANKS, Arrived, LowLatencyKernels
from moeserve.dispatch.peers.ll_layout import NOWHERE, LowLatencyLayout
from moeserve.dispatch.peers.ll_twin import LowLatencyTwin
from moeserve.dispatch.peers.memory import PeerMemory
from moeserve.dispatch.routing import Routing
from moeserve.dispatch.wire import ROW_WISE
from moeserve.experts.batch import ExpertBatch, Grouping

HIDDEN_MULTIPLE = 16
"""Columns that a thread quantizes."""

MOST_CHOICES = 32
"""Of a row: a warp holds one a lane."""


@dataclass(frozen=True, eq=False)
class _Ticket:
    step: int  # this carrier's count
    arrived: Arrived
    routing: Routing


class NvlinkLowLatency(Dispatcher):
    """The carrier over the memory of the default group's ranks, which share a host."""

    def __init__(self, spec: DispatchSpec) -> None:
        check_spec(spec)
        check_group(spec)
        check_sizes(spec)
        self._spec, self._layout = spec, LowLatencyLayout(spec)
        self._attendance = Attendance(spec.ranks, spec.device)
        self._memory = PeerMemory(
            self._layout.nbytes, spec.rank, spec.ranks, spec.device, refused=lacks_room(spec)
        )
        phases = (spec, self._layout, self._memory, self._attendance)
        self._kernels = None if spec.device == "cpu" else LowLatencyKernels(*phases)
        self._twin = LowLatencyTwin(*phases) if spec.device == "cpu" else None
        rows = torch.arange(spec.slots + 1, dtype=torch.int32, device=spec.device)
        self._offsets = rows * self._layout.capacity
        self._traffic, self._steps = Traffic(), 0

    def dispatch(self, hidden: Tensor, routing: Routing) -> Pending[Dispatched]:
        """Sends this lane's rows and places what arrives: tokens `[e, C, H]`, counts `[e]`."""
        spec = self._spec
        check_lane(spec, hidden, routing)
        self._steps += 1
        if self._twin:
            arrived = self._twin.dispatch(hidden, routing, destinations(spec, routing.slots))
        else:
            assert self._kernels is not None
            arrived = self._kernels.dispatch(hidden, routing)
        own = routing.lane_rows[spec.rank]
        words = own * (spec.ranks - 1) * 16 * self._layout.words
        self._traffic = self._traffic.plus(dispatched=self._copies(own) * self._layout.record.nbytes + words)
        batch = ExpertBatch(arrived.tokens, Grouping.PADDED, arrived.counts, self._offsets)
        return Pending(lambda: Dispatched(batch, _Ticket(self._steps, arrived, routing)))

    def combine(self, outputs: Tensor, ticket: _Ticket) -> Pending[Tensor]:
        """Brings `outputs [e, C, H]` (or `[e * C, H]`) home as one partial sum a row and rank: `[T, H]`.

        Raises ValueError for outputs of another size or dtype, and for a step dispatched too long ago.
        """
        spec, routing = self._spec, ticket.routing
        self._check(outputs, ticket)
        flat = outputs.reshape(-1, spec.hidden)
        if self._twin:
            reached = destinations(spec, routing.slots)
            answer = self._twin.combine(flat, ticket.arrived, routing.lane_rows, reached)
        else:
            assert self._kernels is not None
            answer = self._kernels.combine(flat, ticket.arrived, routing)
        others = sum(routing.lane_rows) - routing.lane_rows[spec.rank]
        self._traffic = self._traffic.plus(combined=others * spec.hidden * spec.dtype.itemsize)
        return Pending(lambda: answer)

    def exclude(self, ranks: tuple[int, ...]) -> None:
        """Neither waits for `ranks` nor stores to them from the next phase on. Each rank for itself."""
        self._attendance.exclude(ranks)

    def interrupt(self) -> None:
        """Waits for nobody any more, in the phase under way neither."""
        self._attendance.interrupt()

    def late(self) -> tuple[int, ...]:
        """Ranks given up since this was last asked, as far as the device has come."""
        return self._attendance.late()

    @property
    def traffic(self) -> Traffic:
        """Most bytes that can have gone to other ranks: how many did, only the device knows."""
        return self._traffic

    def close(self) -> None:
        """Unmaps and frees the peer memory; on a GPU it waits for the device."""
        self._memory.close()

    def _copies(self, rows: int) -> int:
        """Most copies of so many rows that leave this rank."""
        others = self._spec.ranks - 1
        return rows * (others if self._spec.sliced else min(self._spec.top_k, others))

    def _check(self, outputs: Tensor, ticket: _Ticket) -> None:
        spec, rows = self._spec, self._spec.slots * self._layout.capacity
        if outputs.numel() != rows * spec.hidden or outputs.dtype != spec.dtype:
            raise ValueError(
                f"outputs must be {spec.dtype} [{spec.slots}, {self._layout.capacity}, {spec.hidden}]; "
                f"found {outputs.dtype} {list(outputs.shape)}"
            )
        if self._steps - ticket.step >= BUFFERS:
            raise ValueError(
                f"this step was dispatched {self._steps - ticket.step} steps ago; "
                f"at most {BUFFERS} can be under way, so combine it sooner"
            )


def bytes_needed(spec: DispatchSpec) -> int:
    """Bytes of a rank's device that the carrier of `spec` takes: peer memory, and batches under way."""
    layout = LowLatencyLayout(spec)
    return layout.nbytes + BUFFERS * layout.batch_bytes


def check_sizes(spec: DispatchSpec) -> None:
    """Raises ValueError, alike on every rank, for what the words on the way have no room for."""
    if spec.ranks > MOST_RANKS:
        raise ValueError(f"nvlink_ll joins at most {MOST_RANKS} ranks, not {spec.ranks}")
    if spec.hidden % HIDDEN_MULTIPLE:
        raise ValueError(f"H={spec.hidden} must be a multiple of {HIDDEN_MULTIPLE} for nvlink_ll")
    if not 0 < spec.lane_rows <= MOST_LANE_ROWS:
        raise ValueError(f"lane_rows={spec.lane_rows} must lie between 1 and {MOST_LANE_ROWS} for nvlink_ll")
    if not 0 < spec.top_k <= MOST_CHOICES:
        raise ValueError(f"top_k={spec.top_k} must lie between 1 and {MOST_CHOICES} for nvlink_ll")
    slots = spec.slots * (1 if spec.sliced else spec.ranks)
    if slots >= NOWHERE:
        raise ValueError(f"{slots} slots do not fit in 16 bits; nvlink_ll numbers at most {NOWHERE - 1}")


def lacks_room(spec: DispatchSpec) -> str:
    """Why this rank's device has no room for the carrier of `spec`; empty where it has."""
    if spec.device == "cpu":
        return ""
    needed, (free, _) = bytes_needed(spec), torch.cuda.mem_get_info(spec.device)
    if needed <= free:
        return ""
    return (
        f"needs {needed} bytes for {spec.lane_rows} rows a lane, {spec.ranks} ranks and {spec.slots} slots; "
        f"{free} are free: lower lane_rows, or use another carrier for so many rows"
    )


ROW = DispatchRow(
    name="nvlink_ll",
    build=NvlinkLowLatency,
    wires=ROW_WISE,
    grouping=Grouping.PADDED,
    pace=Pace.LOW_LATENCY,
    archs=frozenset(("cpu", "sm90", "sm100", "sm103")),
    in_flight=BUFFERS,
    max_ranks=MOST_RANKS,
    sliced=True,
    partial_sums=PARTIAL_SUMS,
    limits=Limits(top_k=MOST_CHOICES, hidden_multiple=HIDDEN_MULTIPLE, one_host=True),
    only_named=frozenset(("cpu",)),
    verified=("cpu", "sm90"),
)
