"""Where everything stands in a rank's peer memory, and why nothing is overwritten.

A rank writes into sections of its own in every other's memory. All of it stands there twice, and a step uses
the copy of its sequence number's parity. What of sequence number n is read, is read before its writer's
sequence number n + 2 arrives:

* Choices, weights and records. Rank s stores those of n + 2 after its dispatch n + 1, which waited for the
  greeting n + 1 of reader d, and d sent that after its dispatch n had copied everything out. Every rank
  greets every other, also when its lane has no rows. No combine takes part, so a step that was dispatched
  and then abandoned changes nothing.
* Partial sums. Rank d stores those of n + 2 in its combine n + 2, so after its dispatch n + 2, which waited
  for the greeting n + 2 of s. Rank s adds up the sums of n before it dispatches n + 2: the dispatcher refuses
  a combine that comes later. A step that s abandoned is one whose sums it never reads.
* A rank that was given up is waited for no longer, so neither argument holds for it: it is not stored to
  either, and nothing that it stores is read.

All of a rank's phases run in one order, on one stream or on streams that wait for one another.
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
"""Bytes of a checked word: 12 of content, and those four that make its exclusive-or the sequence number."""

CHOICES = 6
"""Slots in a checked word, 16 bits each."""

WEIGHTS = 3
"""In a checked word: float32."""

NOWHERE = 0xFFFF
"""A choice of no slot, in 16 bits."""


@dataclass(frozen=True)
class PeerLayout:
    """Byte offsets of sequence number parity 0; parity 1 stands `parity_bytes` further.

    begun [ranks] uint32, the sequence number that a rank has begun
    choices [ranks, choice_words(lane_rows)] checked words, to every rank: a lane's slots, row by row
    weights [ranks, lane_rows, weight_words] checked words, to every rank
    records [ranks, lane_rows, record_packets] packets
    partials [ranks, lane_rows, partial_packets] packets of H columns of the hidden dtype

    Where packets stand is never anything but packets, so that no number is taken for another sequence
    number's tag.
    """

    spec: DispatchSpec
    grouping: Grouping

    @cached_property
    def record(self) -> RowRecord:
        """A row on its way out."""
        return RowRecord(self.spec.wire, self.spec.hidden)

    def choice_words(self, rows: int) -> int:
        """Words of the choices of a lane of `rows`."""
        return -(-rows * self.spec.top_k // CHOICES)

    @property
    def weight_words(self) -> int:
        """Words of a row's weights."""
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
        """Offset."""
        return self._ends[0]

    @property
    def choices(self) -> int:
        """Offset."""
        return self._ends[1]

    @property
    def weights(self) -> int:
        """Offset."""
        return self._ends[2]

    @property
    def record_packets(self) -> int:
        """Of a row on its way out."""
        return packets_of(self.record.nbytes)

    @property
    def partial_packets(self) -> int:
        """Of a partial sum."""
        return packets_of(self.spec.hidden * self.spec.dtype.itemsize)

    @property
    def records(self) -> int:
        """Offset."""
        return self._ends[3]

    @property
    def partials(self) -> int:
        """Offset."""
        return self._ends[4]

    @property
    def parity_bytes(self) -> int:
        """From one parity's copy to the other's."""
        return self._ends[5] - self._ends[0]

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's peer memory."""
        return self._ends[0] + BUFFERS * self.parity_bytes

    @property
    def capacity(self) -> int:
        """Rows that a slot's part of a PADDED batch holds: those of all lanes, in the kernel's alignment."""
        align = self.spec.row_align
        return -(-self.spec.ranks * self.spec.lane_rows // align) * align

    def batch_shape(self, rows: int) -> tuple[int, ...]:
        """Of the batch of `rows` of all lanes: `[e, C, H]`, or `[Rmax, H]` of a RAGGED one."""
        spec = self.spec
        if self.grouping is Grouping.PADDED:
            return spec.slots, self.capacity, spec.hidden
        return row_capacity(rows, spec.top_k, spec.slots, spec.row_align), spec.hidden

    @property
    def batch_bytes(self) -> int:
        """Most bytes of one dispatched batch."""
        return self.spec.wire.nbytes(self.batch_shape(self.spec.ranks * self.spec.lane_rows))
