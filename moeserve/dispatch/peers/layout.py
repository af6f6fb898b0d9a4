"""The layout of a rank's peer memory, and why nothing is overwritten before it is read.

Each rank writes into sections of its own in the memory of every other rank. Every section exists twice, and
a step uses the copy of its sequence number's parity. So step n + 2 writes where step n wrote, and the reader
must have read step n by then. Each dispatch sets a begun flag, its sequence number, on every other rank,
also when its lane has no rows, and ends only when it has found the flags of all live ranks.

* Choices, weights and records. Let rank s write and rank d read. Rank s stores those of n + 2 after its
  dispatch n + 1 has found the begun flag n + 1 of d. Rank d set that flag in its dispatch n + 1, which began
  after its dispatch n had copied everything out. No combine takes part, so a step that was dispatched and
  then abandoned changes nothing.
* Partial sums. Let rank d write and rank s read. Rank d stores those of n + 2 in its combine n + 2, after its
  dispatch n + 2 has found the begun flag n + 2 of s. Rank s adds up the sums of n before it dispatches n + 2,
  since the dispatcher refuses a combine that comes later. The sums of a step that s abandoned are never read.
* A rank that was given up is waited for no longer, so neither argument holds for it. It is not stored to
  either, and nothing that it stores is read.

All phases of a rank run in one order, on one stream or on streams that wait for one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.peers.liveness import GIVEN_UP_BYTES
from moeserve.dispatch.peers.packets import PACKET, packets_of
from moeserve.dispatch.peers.sequence import BUFFERS
from moeserve.dispatch.peers.wires import RowRecord
from moeserve.dispatch.permute import row_capacity
from moeserve.experts.batch import Grouping

ALIGN = 256
WORD = 16
"""Bytes of a checked word: 12 of content, and four that make the exclusive-or of all the sequence number."""

CHOICES = 6
"""Slots in a checked word, 16 bits each."""

WEIGHTS = 3
"""Weights in a checked word, float32 each."""

NOWHERE = 0xFFFF
"""What stands for a choice of no slot in 16 bits."""


@dataclass(frozen=True)
class PeerLayout:
    """Byte offsets of sequence number parity 0; parity 1 stands `parity_bytes` further.

    begun [ranks] uint32, the sequence number that a rank has begun
    choices [ranks, choice_words(lane_rows)] checked words, to every rank: a lane's slots, row by row
    weights [ranks, lane_rows, weight_words] checked words, to every rank
    records [ranks, lane_rows, record_packets] packets
    partials [ranks, lane_rows, partial_packets] packets of H columns of the hidden dtype

    Where packets stand there are never other bytes than packets, so that no content is taken for a packet's
    sequence number.
    """

    spec: DispatchSpec
    grouping: Grouping

    @cached_property
    def record(self) -> RowRecord:
        """How a row is laid out on its way to other ranks."""
        return RowRecord(self.spec.wire, self.spec.hidden)

    def choice_words(self, rows: int) -> int:
        """How many checked words the choices of a lane of `rows` take."""
        return -(-rows * self.spec.top_k // CHOICES)

    @property
    def weight_words(self) -> int:
        """How many checked words the weights of a row take."""
        return -(-self.spec.top_k // WEIGHTS)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        rows = self.spec.ranks * self.spec.lane_rows
        sizes = (
            4 * self.spec.ranks,
            self.spec.ranks * self.choice_words(self.spec.lane_rows) * WORD,
            rows * self.weight_words * WORD,
            rows * self.record_packets * PACKET,
            rows * self.partial_packets * PACKET,
        )
        ends = [-(-GIVEN_UP_BYTES // ALIGN) * ALIGN]
        for size in sizes:
            ends.append(ends[-1] + -(-size // ALIGN) * ALIGN)
        return tuple(ends)

    @property
    def begun(self) -> int:
        """The offset of the section `begun`, in bytes."""
        return self._ends[0]

    @property
    def choices(self) -> int:
        """The offset of the section `choices`, in bytes."""
        return self._ends[1]

    @property
    def weights(self) -> int:
        """The offset of the section `weights`, in bytes."""
        return self._ends[2]

    @property
    def record_packets(self) -> int:
        """How many packets a row takes on its way to other ranks."""
        return packets_of(self.record.nbytes)

    @property
    def partial_packets(self) -> int:
        """How many packets a partial sum takes."""
        return packets_of(self.spec.hidden * self.spec.dtype.itemsize)

    @property
    def records(self) -> int:
        """The offset of the section `records`, in bytes."""
        return self._ends[3]

    @property
    def partials(self) -> int:
        """The offset of the section `partials`, in bytes."""
        return self._ends[4]

    @property
    def parity_bytes(self) -> int:
        """Bytes from one parity's copy of the sections to the other's."""
        return self._ends[5] - self._ends[0]

    @property
    def nbytes(self) -> int:
        """How many bytes a rank's peer memory has."""
        return self._ends[0] + BUFFERS * self.parity_bytes

    @property
    def capacity(self) -> int:
        """How many rows a PADDED batch holds for each slot: those of all lanes, in the kernel's alignment."""
        align = self.spec.row_align
        return -(-self.spec.ranks * self.spec.lane_rows // align) * align

    def batch_shape(self, rows: int) -> tuple[int, ...]:
        """The shape of a batch of `rows` of all lanes: `[e, C, H]` if PADDED, `[Rmax, H]` if RAGGED."""
        spec = self.spec
        if self.grouping is Grouping.PADDED:
            return spec.slots, self.capacity, spec.hidden
        return row_capacity(rows, spec.top_k, spec.slots, spec.row_align), spec.hidden

    @property
    def batch_bytes(self) -> int:
        """How many bytes one dispatched batch takes at most."""
        return self.spec.wire.nbytes(self.batch_shape(self.spec.ranks * self.spec.lane_rows))
