"""`PeerDispatcher`: ranks of one host store rows straight into one another's memory, and no host waits.

A row goes once to each rank that needs it, quantized on the way out; its choices go to all ranks ahead of it.
So each rank counts where everything will stand before it arrives, and places rows by slot as they come,
PADDED or RAGGED. To combine, a rank adds up its own experts' weighted outputs of a row in float32, and stores
that one partial sum into the memory of the row's rank. Each phase is one kernel, for a CUDA graph too; two
steps can be under way.

A peer that does not come within `spec.patience` seconds is given up: named by `late`, its rows count as
none, and the step goes on. On a CPU the same protocol runs over shared memory, for tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.dispatch.checks import check_lane, check_spec
from moeserve.dispatch.dispatcher import Dispatched, Dispatcher, DispatchSpec, Traffic
from moeserve.dispatch.exchange import check_group
from moeserve.dispatch.peers.kernels import (
    MOST_LANE_ROWS,
    MOST_RANKS,
    MOST_SHARED,
    TABLES,
    PeerArrival,
    PeerKernels,
)
from moeserve.dispatch.peers.layout import NOWHERE, PeerLayout
from moeserve.dispatch.peers.liveness import PeerLiveness
from moeserve.dispatch.peers.memory import PeerMemory
from moeserve.dispatch.peers.sequence import BUFFERS
from moeserve.dispatch.peers.twin import PeerTwin
from moeserve.dispatch.peers.wires import RowRecord
from moeserve.dispatch.routing import Routing
from moeserve.experts.batch import ExpertBatch, Grouping

HIDDEN_MULTIPLE = 16
"""Columns that a thread quantizes at once; the hidden size is a multiple of it."""

MOST_CHOICES = 32
"""Choices of a row: each thread of a warp holds one."""


@dataclass(frozen=True, eq=False)
class _PeerTicket:
    step: int  # this dispatcher's count
    arrived: PeerArrival
    routing: Routing


class PeerDispatcher(Dispatcher):
    """The dispatcher over the memory of the default group's ranks, which share a host."""

    def __init__(self, spec: DispatchSpec, grouping: Grouping) -> None:
        check_spec(spec)
        check_group(spec)
        check_sizes(spec)
        self._spec, self._layout = spec, PeerLayout(spec, grouping)
        self._liveness = PeerLiveness(spec.ranks, spec.device)
        self._memory = PeerMemory(
            self._layout.nbytes, spec.rank, spec.ranks, spec.device, refused=lacks_room(self._layout)
        )
        phases = (self._layout, self._memory, self._liveness)
        self._kernels = None if spec.device == "cpu" else PeerKernels(*phases)
        self._twin = PeerTwin(*phases) if spec.device == "cpu" else None
        self.counts_on_device = self._kernels is not None
        self._steps = 0

    def dispatch(self, hidden: Tensor, routing: Routing) -> Dispatched:
        """Sends each row once to every rank it needs, and places what arrives by slot."""
        check_lane(self._spec, hidden, routing)
        self._steps += 1
        if self._twin:
            arrived = self._twin.dispatch(hidden, routing)
        else:
            assert self._kernels is not None
            arrived = self._kernels.dispatch(hidden, routing)
        batch = ExpertBatch(arrived.tokens, self._layout.grouping, arrived.counts, arrived.offsets)
        return Dispatched(batch, _PeerTicket(self._steps, arrived, routing))

    def combine(self, outputs: Tensor, ticket: _PeerTicket) -> Tensor:
        """Brings `outputs`, shaped as the batch, home as one partial sum a row and rank: `[T, H]`.

        Raises ValueError for outputs of another size or dtype, and for a step dispatched too long ago.
        """
        spec, routing = self._spec, ticket.routing
        self._check(outputs, ticket)
        flat = outputs.reshape(-1, spec.hidden)
        if self._twin:
            answer = self._twin.combine(flat, ticket.arrived, routing)
        else:
            assert self._kernels is not None
            answer = self._kernels.combine(flat, ticket.arrived, routing)
        return answer

    def exclude(self, ranks: Iterable[int]) -> None:
        """Stops waiting for `ranks` and storing to them, from the next phase on; only this rank does so."""
        self._liveness.exclude(ranks)

    def interrupt(self) -> None:
        """Ends all waiting for peers, also in the phase under way."""
        self._liveness.interrupt()

    def late(self) -> tuple[int, ...]:
        """The ranks given up since the last call, as far as the device has come."""
        return self._liveness.late()

    @property
    def traffic(self) -> Traffic:
        """Bytes of rows and sums that went to other ranks; on a GPU a later step updates them."""
        counted = self._kernels or self._twin
        assert counted is not None
        copies, sums = counted.sent.tolist()
        answer = self._spec.hidden * self._spec.dtype.itemsize
        return Traffic(copies * self._layout.record.nbytes, sums * answer)

    def close(self) -> None:
        """Unmaps and frees the peer memory; on a GPU it waits for the device."""
        self._memory.close()

    def _check(self, outputs: Tensor, ticket: _PeerTicket) -> None:
        shape, dtype = ticket.arrived.tokens.shape, self._spec.dtype
        if outputs.numel() != math.prod(shape) or outputs.dtype != dtype:
            found = f"{outputs.dtype} {list(outputs.shape)}"
            raise ValueError(f"outputs must be {dtype} {list(shape)}; found {found}")
        if self._steps - ticket.step >= BUFFERS:
            raise ValueError(
                f"this step was dispatched {self._steps - ticket.step} steps ago; "
                f"at most {BUFFERS} can be under way, so combine it sooner"
            )


def bytes_needed(layout: PeerLayout) -> int:
    """Bytes of a rank's device that the dispatcher takes: peer memory, and batches under way."""
    return layout.nbytes + BUFFERS * layout.batch_bytes


def check_sizes(spec: DispatchSpec) -> None:
    """Raises ValueError, alike on every rank, for what the words on the way have no room for."""
    if spec.ranks > MOST_RANKS:
        raise ValueError(f"peer memory joins at most {MOST_RANKS} ranks, not {spec.ranks}")
    if spec.hidden % HIDDEN_MULTIPLE:
        raise ValueError(f"H={spec.hidden} must be a multiple of {HIDDEN_MULTIPLE}")
    if not 0 < spec.lane_rows <= MOST_LANE_ROWS:
        raise ValueError(f"lane_rows={spec.lane_rows} must lie between 1 and {MOST_LANE_ROWS}")
    if not 0 < spec.top_k <= MOST_CHOICES:
        raise ValueError(f"top_k={spec.top_k} must lie between 1 and {MOST_CHOICES}")
    slots = spec.slots * (1 if spec.sliced else spec.ranks)
    if slots >= NOWHERE:
        raise ValueError(f"{slots} slots do not fit in 16 bits; peer memory numbers at most {NOWHERE - 1}")
    room = max(RowRecord(spec.wire, spec.hidden).nbytes, TABLES * spec.slots)
    if room > MOST_SHARED:
        raise ValueError(
            f"a row of H={spec.hidden} and {spec.slots} slots need {room} bytes of a block's "
            f"shared memory, and {MOST_SHARED} are there"
        )


def lacks_room(layout: PeerLayout) -> str:
    """Why this rank's device has no room for a dispatcher of `layout`; empty where it has."""
    spec = layout.spec
    if spec.device == "cpu":
        return ""
    needed, (free, _) = bytes_needed(layout), torch.cuda.mem_get_info(spec.device)
    if needed <= free:
        return ""
    return (
        f"needs {needed} bytes for {spec.lane_rows} rows a lane, {spec.ranks} ranks and {spec.slots} slots; "
        f"{free} are free: lower lane_rows, or use another dispatcher for so many rows"
    )
