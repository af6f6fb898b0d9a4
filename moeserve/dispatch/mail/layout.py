"""`MailLayout`: what lies where in the memory of a device lane of a GPU, and in the words beside it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch

from moeserve.dispatch.peers.wires import RowRecord
from moeserve.quant.formats import FP8_GROUP, WIRES

LINE_BYTES = 32  # of a block's tag, and what is said with it
VERSION_AT = 20  # in a line of answers: the version of the weights, 32 bits
ALIGNED = 256
ROUNDED = FP8_GROUP.name
"""The wire in which rows may come: rounded to it, and home in their own dtype."""

GROUP = 128  # columns that have a scale in it

FEW_BLOCKS = 4
"""So many blocks at most wait by themselves; where more read a step, one waits before they are launched."""

FEW_SHARES = 32
"""Up to so many shares are read by few blocks: to launch one that waits costs more than they do."""

MOST_BLOCKS = 64  # of a kernel that brings, takes, posts or fetches
SHARE_WORDS = 896  # 16-byte words of rows for which a block more pays; SHARE in mail.cu
WORDS = 32
"""64-bit words of a caller's table, and of an owner's state of a lane."""

STEPS = 16
"""The first of the words that count the steps of each stage; one word a stage."""


class Word(IntEnum):
    """Words of a table and of a state, by place."""

    MAILBOX = 0  # address of the owner's memory, as this side has it mapped
    ANSWERS = 1  # address of the caller's memory, likewise
    NUMBER = 2  # of the pass
    PATIENCE = 3  # nanoseconds that a kernel waits
    ENDED = 4  # how the pass has ended, a status; 0 while it runs
    ABORT = 5  # address of a word of the host's: not 0 ends all waits; 0: there is none
    MIRROR = 6  # address of host memory: of a table, the mailbox that the host reads, 0: there is none;
    # of a state, where its words are told when a run has ended
    TAKEN = 7  # of a state: 32 bits of every other step that was taken: rows, and the buffer of its answer
    EPOCH = 8  # of a state: of the answers
    VERSION = 9  # of a state: of the weights
    AGREED = 10  # of a state: rows of the step that several blocks took last, and 1; above them which it is
    LEAST = 11  # of a state: how few rows the next step may have, of a run that was launched before they came
    TOOK = 12  # of a state: steps of the run that were taken
    READ = 13  # of a state: twice those of them that were read to be posted; one less: its kernels are over
    DONE = 14  # of a state: those of them that were posted
    OWN = 15  # address of a lane's own state, to which a run that has ended brings its words back


@dataclass(frozen=True)
class MailLayout:
    """The sizes of a device lane of a GPU, and the places that follow from them, in bytes.

    rows: of a step at most. A mailbox has for each stage a line of each block, hidden states `[rows, H]` of
    `dtype`, ids int32 and weights float32 `[rows, K]`, and logits float32 `[rows, E]`; answers have lines,
    and `[rows, H]`. wire: in which hidden states come, as records one after another: ROUNDED, or empty: as
    they are. Raises ValueError where a row is no multiple of 16 bytes, and where it cannot come in that wire.
    """

    rows: int
    stages: int
    hidden: int
    experts: int
    top_k: int
    dtype: torch.dtype
    wire: str = ""

    def __post_init__(self) -> None:
        if self.row_bytes % 16:
            raise ValueError(
                f"a row of {self.hidden} {self.dtype} has {self.row_bytes} bytes; device lanes of a GPU take "
                "multiples of 16"
            )
        if self.wire and (why := why_not_rounded(self.hidden, self.dtype, self.wire)):
            raise ValueError(why)

    @property
    def in_host_memory(self) -> bool:
        """Whether rows and answers lie there, with one header for all blocks of a step."""
        return False

    @property
    def answer_buffers(self) -> tuple[int, int]:
        """In how many a stage's answer may be wanted, and bytes from one to the next."""
        return 1, 0

    @property
    def row_bytes(self) -> int:
        """Of one row of hidden states, or of answers."""
        return self.hidden * self.dtype.itemsize

    @property
    def row_words(self) -> int:
        """16-byte words of one row."""
        return self.row_bytes // 16

    @cached_property
    def record(self) -> RowRecord | None:
        """How a row lies in the mailbox; None: as it is."""
        return RowRecord(WIRES[self.wire], self.hidden) if self.wire else None

    @property
    def mailbox_row_bytes(self) -> int:
        """Of one row of hidden states in the mailbox."""
        return self.row_bytes if self.record is None else self.record.nbytes

    @property
    def blocks(self) -> int:
        """Most blocks of a kernel of this lane, and lines of a stage."""
        return min(MOST_BLOCKS, max(1, self.rows * self.row_words // SHARE_WORDS))

    def blocks_of(self, rows: int) -> int:
        """Among how many blocks `rows` rows are divided when they are written; `blocks_of` in mail.cu."""
        return min(self.blocks, max(1, rows * self.row_words // SHARE_WORDS))

    def readers_of(self, rows: int, beside: int = 0) -> int:
        """How many blocks read them; more than FEW_BLOCKS do not wait by themselves. beside: 16-byte words of
        logits that come with each.
        """
        few = rows * (self.row_words + beside) <= FEW_SHARES * SHARE_WORDS
        return min(self.blocks_of(rows), FEW_BLOCKS) if few else self.blocks_of(rows)

    @property
    def _lines(self) -> int:
        return _aligned(self.blocks * LINE_BYTES)

    @property
    def _columns(self) -> tuple[int, ...]:
        """Bytes of a stage's lines, hidden states, ids, weights and logits."""
        chosen = _aligned(self.rows * self.top_k * 4)
        logits = _aligned(self.rows * self.experts * 4)
        return self._lines, _aligned(self.rows * self.mailbox_row_bytes), chosen, chosen, logits

    @property
    def mailbox_bytes(self) -> int:
        """Of the owner's memory."""
        return self.stages * sum(self._columns)

    @property
    def answers_bytes(self) -> int:
        """Of the caller's memory."""
        return self.stages * (self._lines + _aligned(self.rows * self.row_bytes))

    def columns(self, stage: int) -> tuple[int, int, int, int, int]:
        """Where a stage's lines, hidden states, ids, weights and logits begin in the mailbox."""
        lines, hidden, ids, weights, logits = self._columns
        at = stage * (lines + hidden + ids + weights + logits)
        first = at + lines
        return at, first, first + hidden, first + hidden + ids, first + hidden + ids + weights

    def answer(self, stage: int) -> tuple[int, int]:
        """Where a stage's lines and its answer begin in the answers."""
        at = stage * (self._lines + _aligned(self.rows * self.row_bytes))
        return at, at + self._lines


def why_not_rounded(hidden: int, dtype: torch.dtype, wire: str) -> str:
    """Why rows of `hidden` elements cannot come in that wire; empty where they can."""
    if wire != ROUNDED:
        return f"rows of device lanes come as they are or as {ROUNDED}, not as {wire}"
    if dtype != torch.bfloat16:
        return f"rows of {dtype} are not those of {ROUNDED} again once they were rounded to it: bfloat16 are"
    if hidden % GROUP:
        return f"a row of {hidden} elements is no multiple of {GROUP}, which have a scale in {ROUNDED}"
    return ""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
