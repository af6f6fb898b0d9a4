"""The layout of a member's peer memory, and why nothing is overwritten before it is read.

A member's memory has a header, then its arrivals if it is an owner, then its sums if it has a lane. Each lane
writes into a place of its own in the arrivals of every owner, and each owner into a place of its own in the
sums of every lane. Both exist twice, and a step uses the copy of its sequence number's parity: the next step
of the same parity writes where this one wrote, and the reader must have read this one by then.

A step's number comes with the step, so numbers may jump, and a lane may be absent from steps. Owners take
part in all of them. An owner begins a dispatch by storing its number into the header of every live lane, also
of absent ones: its begun flag. All phases of a member run in one order, on one stream or on streams that
wait for one another, so a begun flag n also says that the owner has copied out everything of the dispatches
before n.

* Choices, weights and records. Let lane s write and owner d read. Let n be the lane's step and m < n the last
  one before in which it brought rows; steps without it may lie between. Its dispatch m ended only when it had
  found a flag of d that is m or later. If the parities of m and n differ, what s wrote at n's parity is older
  than m, and d has read it: d had begun m. If they are equal, d may still be reading m, and s stores nothing
  of n before it has found a flag of d other than m, which is a later one. That flag comes whatever s does: an
  owner stores it before it waits for anybody, n's own at the latest. The lane waits for half the patience
  only, since all others wait for what it holds back meanwhile. A lane that has not sent anything yet waits in
  the same way for a flag at all. So it may take a seat whose last holder's rows some owner has not read yet.
* Partial sums. Let owner d write and lane s read. Owner d stores sums of n for the rows whose choices of n it
  has read. Lane s sent them in its dispatch n, after it had added up the sums of its step before with the
  same parity, since the dispatcher refuses a combine that comes later. The sums of a step that s abandoned
  are never read.
* A member that was given up is waited for no longer, so neither argument holds for it. It is not stored to
  either, and nothing that it stores is read. Its seat gets another holder only when it has been seen dead.

A flag is compared with m for equality, and with n as of two numbers less than 2^31 apart: so far ahead of a
lane an owner cannot be in steps of which each takes microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.members import Member
from moeserve.dispatch.peers.liveness import HEADER_BYTES
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
    """Byte offsets in the memory of the members of a group.

    header: `given_up [64]` int32, `begun [64]` uint32 by owner
    arrivals of an owner, each section from where the arrivals of a parity begin:
        choices [lanes, choice_words(lane_rows)] checked words: a lane's slots, row by row
        weights [lanes, lane_rows, weight_words] checked words
        records [lanes, lane_rows, record_packets] packets
    sums of a lane: [owners, lane_rows, partial_packets] packets of H columns of the hidden dtype

    `lanes` and `owners` count reserved places too. Where packets stand there are never other bytes than
    packets, so that no content is taken for a packet's sequence number.
    """

    spec: DispatchSpec
    grouping: Grouping

    @property
    def lanes(self) -> int:
        """How many lanes an owner has room for."""
        return self.spec.members.max_lanes

    @property
    def owners(self) -> int:
        """How many owners a lane has room for."""
        return self.spec.members.max_owners

    @cached_property
    def record(self) -> RowRecord:
        """How a row is laid out on its way to owners."""
        return RowRecord(self.spec.wire, self.spec.hidden)

    def choice_words(self, rows: int) -> int:
        """How many checked words the choices of a lane of `rows` take."""
        return -(-rows * self.spec.top_k // CHOICES)

    @property
    def weight_words(self) -> int:
        """How many checked words the weights of a row take."""
        return -(-self.spec.top_k // WEIGHTS)

    @property
    def record_packets(self) -> int:
        """How many packets a row takes on its way to owners."""
        return packets_of(self.record.nbytes)

    @property
    def partial_packets(self) -> int:
        """How many packets a partial sum takes."""
        return packets_of(self.spec.hidden * self.spec.dtype.itemsize)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        rows = self.lanes * self.spec.lane_rows
        sizes = (
            self.lanes * self.choice_words(self.spec.lane_rows) * WORD,
            rows * self.weight_words * WORD,
            rows * self.record_packets * PACKET,
        )
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + _aligned(size))
        return tuple(ends)

    @property
    def choices(self) -> int:
        """The offset of the section `choices` in arrivals, in bytes."""
        return self._ends[0]

    @property
    def weights(self) -> int:
        """The offset of the section `weights` in arrivals, in bytes."""
        return self._ends[1]

    @property
    def records(self) -> int:
        """The offset of the section `records` in arrivals, in bytes."""
        return self._ends[2]

    @property
    def arrivals_bytes(self) -> int:
        """Bytes of an owner's arrivals of one parity."""
        return self._ends[3]

    @property
    def sums_bytes(self) -> int:
        """Bytes of a lane's sums of one parity."""
        return _aligned(self.owners * self.spec.lane_rows * self.partial_packets * PACKET)

    @property
    def arrivals(self) -> int:
        """The offset of an owner's arrivals of parity 0 in its memory, in bytes."""
        return HEADER_BYTES

    def sums(self, member: Member) -> int:
        """The offset of the sums of parity 0 in the memory of `member`, which has a lane, in bytes."""
        return HEADER_BYTES + (0 if member.owner is None else BUFFERS * self.arrivals_bytes)

    def nbytes_of(self, member: Member) -> int:
        """How many bytes the memory of `member` has."""
        return self.sums(member) + (0 if member.lane is None else BUFFERS * self.sums_bytes)

    @property
    def nbytes(self) -> int:
        """How many bytes the memory of the member has that it is made for."""
        return self.nbytes_of(self.spec.member)

    @property
    def capacity(self) -> int:
        """How many rows a PADDED batch holds for each slot: those of all lanes, in the kernel's alignment."""
        align = self.spec.row_align
        return -(-self.lanes * self.spec.lane_rows // align) * align

    def batch_shape(self, rows: int) -> tuple[int, ...]:
        """The shape of a batch of `rows` of all lanes: `[e, C, H]` if PADDED, `[Rmax, H]` if RAGGED."""
        spec = self.spec
        if self.grouping is Grouping.PADDED:
            return spec.slots_here, self.capacity, spec.hidden
        if spec.member.owner is None:
            return 0, spec.hidden
        return row_capacity(rows, spec.top_k, spec.slots_here, spec.row_align), spec.hidden

    @property
    def batch_bytes(self) -> int:
        """How many bytes one dispatched batch takes at most."""
        return self.spec.wire.nbytes(self.batch_shape(self.lanes * self.spec.lane_rows))


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
