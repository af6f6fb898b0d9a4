"""How the high-throughput carrier cuts its work and its memory: `Cut`, the warps of a block; `Layout`, the
bytes that every rank maps of every other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moeserve.dispatch.dispatcher import DispatchSpec
from moeserve.dispatch.peers.late import FAREWELL_BYTES
from moeserve.dispatch.peers.wires import RowRecord

WORD = 8  # bytes: an epoch above, a number below
DONE = 1 << 31
"""In a word's number: nothing will follow in this epoch."""

SECTION_ALIGN = 256
ROW_ALIGN = 128  # where rows in shared and peer memory begin
MOST_RANKS = 8
MOST_CHOICES = 32  # one a lane of a warp
PIECE_BYTES = 4096  # of a partial sum, in one bulk copy
STATIC_BYTES = 40 << 10  # of a block's shared memory, for tables
CUTS = (
    (8, 4, 3),
    (8, 4, 2),
    (4, 4, 3),
    (4, 2, 3),
    (4, 2, 2),
    (2, 2, 4),
    (2, 2, 2),
    (2, 1, 2),
    (1, 1, 2),
)
"""Senders, receivers, and rows a receiver holds; the first that fits in shared memory and leaves no block
idle is taken.
"""


@dataclass(frozen=True)
class Cut:
    """Warps of a block, and the rows they hold in shared memory."""

    blocks: int
    senders: int  # channels of a block
    receivers: int
    ring: int  # rows that a receiving warp holds
    split: int  # parts of a row that go home by themselves, an even number

    @property
    def channels(self) -> int:
        """Runs of tokens that travel by themselves."""
        return self.blocks * self.senders


@dataclass(frozen=True)
class Layout:
    """Every rank's memory: words, counts, rows that arrive, and partial sums that come home.

    A lane's tokens are cut into `channels` runs, channel c from token c T / channels on; each has room for
    `channel_rows` rows from each rank, whatever T is, so that a channel meets only its own earlier rows.
    Sections are named as kernels and twin know them; `starts` has their first bytes.
    """

    ranks: int
    slots: int  # of a rank
    blocks: int
    channels: int
    split: int
    channel_rows: int
    row_bytes: int  # of a record and what travels behind it
    placed_bytes: int  # with the positions behind, which come by themselves
    answer_bytes: int  # of a partial sum

    @classmethod
    def of(cls, spec: DispatchSpec, cut: Cut) -> Layout:
        """The layout for lanes of up to `spec.lane_rows` tokens."""
        row_bytes = record_bytes(spec) + _up(4 * tail_ints(spec.top_k), 16)
        return cls(
            ranks=spec.ranks,
            slots=spec.slots,
            blocks=cut.blocks,
            channels=cut.channels,
            split=cut.split,
            channel_rows=-(-spec.lane_rows // cut.channels),
            row_bytes=row_bytes,
            placed_bytes=row_bytes + _up(4 * spec.top_k, 16),
            answer_bytes=spec.hidden * spec.dtype.itemsize,
        )

    @property
    def row_stride(self) -> int:
        """Bytes from one arrived row to the next."""
        return _up(self.placed_bytes, ROW_ALIGN)

    @property
    def rank_rows(self) -> int:
        """Rows there is room for from each rank."""
        return self.channels * self.channel_rows

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each section, in order."""
        words = WORD * self.ranks
        return {
            "COUNTED": words,  # by each rank: it has told its counts
            "COUNTED_CREDIT": words,  # by each rank: it has read this rank's
            "COUNTS": 4 * self.ranks * self.slots,
            "POSITIONED": words * self.blocks,  # by each rank: positions of a block's channels are here
            "PROGRESS": words * self.channels,  # by each rank: rows that are here
            "CREDIT": words * self.channels,  # by each rank: it has taken this rank's
            "BACK_PROGRESS": words * self.channels * self.split,
            "BACK_CREDIT": words * self.channels * self.split,
            "ROWS": self.ranks * self.rank_rows * self.row_stride,
            "BACK": self.ranks * self.rank_rows * self.answer_bytes,
        }

    @cached_property
    def starts(self) -> dict[str, int]:
        """First byte of each section."""
        at, starts = _up(FAREWELL_BYTES, SECTION_ALIGN), {}
        for name, size in self.sizes.items():
            starts[name] = at
            at += _up(size, SECTION_ALIGN)
        return starts

    @property
    def nbytes(self) -> int:
        """Bytes of each rank's memory."""
        return self.starts["BACK"] + _up(self.sizes["BACK"], SECTION_ALIGN)

    def first_token(self, channel: int, tokens: int) -> int:
        """Where a channel's run of a lane's `tokens` begins."""
        return channel * tokens // self.channels


def cut_for(spec: DispatchSpec, multiprocessors: int, shared_bytes: int) -> Cut:
    """How a GPU with `shared_bytes` of shared memory a block works on `spec`.

    Raises ValueError for sizes that its kernels have no room for.
    """
    check_sizes(spec)
    most = max(2, -(-spec.lane_rows // (multiprocessors - 1)))
    for senders, receivers, ring in CUTS:
        if senders > most:
            continue
        blocks = max(1, min(multiprocessors - 1, -(-spec.lane_rows // senders)))
        cut = Cut(blocks, senders, receivers, ring, split=16 // senders)
        layout = Layout.of(spec, cut)
        tables = 4 * spec.ranks * spec.slots + 8 * senders * layout.channel_rows * spec.top_k + 1024
        rows = (2 * senders + ring * receivers) * layout.row_stride
        watched = spec.ranks * senders // receivers
        if watched <= 32 and tables <= STATIC_BYTES and rows + tables <= shared_bytes:
            return cut
    raise ValueError(
        f"a row of {record_bytes(spec)} bytes (H={spec.hidden}, wire {spec.wire}), "
        f"{spec.ranks} x {spec.slots} slots and lanes of {spec.lane_rows} rows do not fit in "
        f"{shared_bytes} bytes of shared memory; use all2allv"
    )


def check_sizes(spec: DispatchSpec) -> None:
    """Raises ValueError for a spec that neither kernels nor twin serve."""
    if spec.hidden % 16:
        raise ValueError(f"H={spec.hidden} must be a multiple of 16 for nvlink_ht; use all2allv")
    if spec.ranks > MOST_RANKS:
        raise ValueError(f"nvlink_ht joins at most {MOST_RANKS} ranks, not {spec.ranks}; use all2allv")
    if not 1 <= spec.top_k <= MOST_CHOICES:
        raise ValueError(
            f"nvlink_ht takes 1 to {MOST_CHOICES} experts a token, not {spec.top_k}; use all2allv"
        )


def record_bytes(spec: DispatchSpec) -> int:
    """Bytes of a row in the wire format."""
    return RowRecord(spec.wire, spec.hidden).nbytes


def tail_ints(top_k: int) -> int:
    """int32 behind a record: token in its channel; slots and weights (float32) of its choices."""
    return 1 + 2 * top_k


def _up(size: int, align: int) -> int:
    return -(-size // align) * align
