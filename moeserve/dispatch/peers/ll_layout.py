"""Where everything of the low-latency carrier stands in a rank's peer memory, and why nothing is overwritten.

A rank writes into sections of its own in every other's memory. All of it stands there twice, and a step uses
the copy of its epoch's parity. What of epoch n is read, is read before its writer's epoch n + 2 arrives:

* Choices and records. Rank s stores those of n + 2 after its dispatch n + 1, which waited for the greeting
  n + 1 of reader d, and d sent that after its dispatch n had copied everything out. Every rank greets every
  other, also when its lane has no rows. No combine takes part, so a step that was dispatched and then
  abandoned changes nothing.
* Partial sums. Rank d stores those of n + 2 in its combine n + 2, so after its dispatch n + 2, which waited
  for the greeting n + 2 of s. Rank s adds up the sums of n before it dispatches n + 2: the carrier refuses a
  combine that comes later. A step that s abandoned is one whose sums it never reads.
* A rank that was given up is waited for no longer, so neither argument holds for it: it is not stored to
  either, and nothing that it stores is read.

All of a rank's phases run in one order, on one stream or on streams that wait for one another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.peers.epochs import BUFFERS
from moeserve.dispatch.peers.late import FAREWELL_BYTES
from moeserve.dispatch.peers.wires import RowRecord

ALIGN = 256
WORD = 16
"""Bytes of a sealed word: 12 of content, and those four that make its exclusive-or the epoch."""

CONTENT = 12
"""Of choices: two slots of 16 bits, two float32 weights."""

SEALED_ROWS = 32
"""Most rows a lane brings to a step whose partial sums are sealed: above, flags cost less than a third more
bytes.
"""

NOWHERE = 0xFFFF
"""A choice of no slot, in 16 bits."""

SPAN_BYTES = 32 * 4 * 16
"""Bytes of a partial sum that travel under one flag: four 16-byte vectors of each lane of a warp."""


@dataclass(frozen=True)
class LowLatencyLayout:
    """Byte offsets of epoch parity 0; parity 1 stands `parity_bytes` further.

    greetings [ranks] uint32, the epoch that a rank has begun
    choices [ranks, lane_rows, words] sealed words, to every rank
    ready [ranks, lane_rows] uint32, the epoch once the record is there
    records [ranks, lane_rows, record bytes]
    returned [ranks, lane_rows, spans] uint32, the epoch once that span of the partial sum is there
    partials [ranks, lane_rows, H] of the hidden dtype
    sealed [ranks, small_rows, ...] partial sums of small steps in sealed words, and never anything but
        sealed words, so that none is taken for another epoch's
    """

    spec: DispatchSpec

    @cached_property
    def record(self) -> RowRecord:
        """A row on its way out."""
        return RowRecord(self.spec.wire, self.spec.hidden)

    @property
    def words(self) -> int:
        """Words of a row's choices."""
        return -(-self.spec.top_k // 2)

    @property
    def spans(self) -> int:
        """Flags of a partial sum."""
        return -(-self.spec.hidden * self.spec.dtype.itemsize // SPAN_BYTES)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        rows = self.spec.ranks * self.spec.lane_rows
        sizes = (
            4 * self.spec.ranks,
            rows * self.words * WORD,
            rows * 4,
            rows * self.record.nbytes,
            rows * 4 * self.spans,
            rows * self.spec.hidden * self.spec.dtype.itemsize,
            self.spec.ranks * self.small_rows * self.sealed_bytes,
        )
        ends = [-(-FAREWELL_BYTES // ALIGN) * ALIGN]
        for size in sizes:
            ends.append(ends[-1] + -(-size // ALIGN) * ALIGN)
        return tuple(ends)

    @property
    def greetings(self) -> int:
        """Offset."""
        return self._ends[0]

    @property
    def choices(self) -> int:
        """Offset."""
        return self._ends[1]

    @property
    def ready(self) -> int:
        """Offset."""
        return self._ends[2]

    @property
    def records(self) -> int:
        """Offset."""
        return self._ends[3]

    @property
    def returned(self) -> int:
        """Offset."""
        return self._ends[4]

    @property
    def partials(self) -> int:
        """Offset."""
        return self._ends[5]

    @property
    def sealed(self) -> int:
        """Offset."""
        return self._ends[6]

    @property
    def sealed_bytes(self) -> int:
        """Bytes of a partial sum in sealed words."""
        return -(-self.spec.hidden * self.spec.dtype.itemsize // CONTENT) * WORD

    @property
    def small_rows(self) -> int:
        """Most rows of a lane whose partial sums are sealed."""
        return min(self.spec.lane_rows, SEALED_ROWS)

    @property
    def parity_bytes(self) -> int:
        """From one parity's copy to the other's."""
        return self._ends[7] - self._ends[0]

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's peer memory."""
        return self._ends[0] + BUFFERS * self.parity_bytes

    @property
    def capacity(self) -> int:
        """Rows that a slot's part of the batch holds: those of all lanes, in the kernel's alignment."""
        align = self.spec.row_align
        return -(-self.spec.ranks * self.spec.lane_rows // align) * align

    @property
    def batch_bytes(self) -> int:
        """Bytes of one dispatched batch."""
        return self.spec.wire.nbytes((self.spec.slots, self.capacity, self.spec.hidden))
