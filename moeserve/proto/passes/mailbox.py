"""What lies where in the memory of a device lane, and in which order it is written and read.

A *pass* is one announcement for many steps: these layers in this order, at so many stages. A *stage* has
rows of its own, and goes through the layers by itself. A step of a stage begins when its tag is in the
stage's header, and has its answer when the same tag is in the answer's. Nothing else is said.

The caller writes the mailbox, the rank writes the answers, and each only reads what the other writes.
Whoever writes a tag has written before all that it stands for. A tag is the pass's number in its upper 32
bits, and below it the step of the stage, counted from 1: no tag comes again while a pass runs. A stage's
rows are the caller's again when the answer's tag is there.

Mailbox, 64-bit words: ANNOUNCED, and what an announcement has; BELL; from LAYERS on the layers. Then a line
of words for each stage: TAG, LAYER, STAGE, COUNT, KIND, FILLED, BUFFER. Then each stage's rows: hidden
states, ids int32, weights float32, logits float32. Answers: ENDED, STATUS, TEXT_BYTES, TAKES; the text; a
line for each stage: TAG, EPOCH, VERSION, ANSWERED; then one answer buffer or more, each with a place for the
answer of every stage.

Where the rank takes them so, a caller may write a tag before the hidden states are there, and says in FILLED
how many are. Of a large answer the rank may say in ANSWERED how many rows are there, before its tag. In which
buffer it is wanted says BUFFER: an answer stays in one while the next steps have theirs in others.
"""

from __future__ import annotations

import platform
import threading
from dataclasses import dataclass
from enum import IntEnum

from moeserve.proto.tensors import DType, Spec, known
from moeserve.proto.transports.shared_memory import aligned

WORD = 8
LINE = 8  # words of a stage's header: one cache line

ANNOUNCED, STEPS, STAGES, FLAGS, WANTED_VERSION, GIVEN_UP, BELL = range(7)
"""Words of the mailbox: the pass's number, written last; its layers, and its stages; STANDING and
ANY_WEIGHTS; the version of the weights that is demanded, 0 for any; the pass that the caller ends; and what
a caller changes behind all that it writes, so that who waits for that is woken. 0: it wakes nobody.
"""

LAYERS = 8  # the first of the words that name layers
MOST_LAYERS = 504
STANDING, ANY_WEIGHTS = 1, 2

TAG, LAYER, STAGE, COUNT, KIND, FILLED, BUFFER = range(7)
"""Words of a stage's header in the mailbox. KIND: CHOICE or LOGITS. FILLED: the rows of hidden states that
are there, and 1; 0: all were when the tag was written. BUFFER: the answer's, counted from 0.
"""

CHOICE, LOGITS = 0, 1

ENDED, STATUS, TEXT_BYTES, TAKES = range(4)
"""Words of the answers: the number of the pass that has ended, written last; how; the bytes of the text; and
what the rank takes of the caller, from when the lane is made: TAKES_FILLED, TAKES_BUFFER.
"""

TAKES_FILLED, TAKES_BUFFER = 1, 2

TEXT = 64  # bytes before the text
MOST_TEXT = 1024

EPOCH, VERSION, ANSWERED = 1, 2, 3
"""Words of a stage's header in the answers, beside TAG. ANSWERED: as `filled_of` has it, of the step under
way or of the last one.
"""

MOST_STAGES, MOST_BUFFERS = 8, 8
LAST_NUMBER = 2**32 - 1
"""Of passes, and of the steps of one stage: both start over at 1."""


class Status(IntEnum):
    """How a pass ended."""

    OK = 1  # every step was answered, or the caller ended a standing pass
    LATE = 2  # rows of the next step did not come within the patience
    LOST = 3  # no answer could be had: the group forms anew, or the rank stops
    OTHER_WEIGHTS = 4  # a layer has other weights than the pass began with, or demanded
    REFUSED = 5  # the announcement, or a step's header or rows, are wrong
    DETACHED = 6  # the lane was detached


@dataclass(frozen=True)
class MailboxLayout:
    """The sizes of a device lane, and the places that follow from them, in bytes."""

    rows: int
    stages: int
    hidden: int
    experts: int
    top_k: int
    dtype: DType
    buffers: int = 1  # of answers

    @classmethod
    def of(
        cls, sizes: tuple[int, int], model: tuple[int, int, int], dtype: str, buffers: int = 1
    ) -> MailboxLayout:
        """sizes: rows and stages; model: hidden size, experts, and experts a token. Raises TensorError."""
        return cls(*sizes, *model, known("dtype", dtype), buffers)

    def hidden_spec(self, count: int) -> Spec:
        """Of hidden states and answers."""
        return Spec(self.dtype, (count, self.hidden))

    def route_specs(self, count: int) -> tuple[Spec, Spec, Spec]:
        """Of ids, weights and logits."""
        chosen = (count, self.top_k)
        fp32 = known("weights", "fp32")
        return (
            Spec(known("ids", "int32"), chosen),
            Spec(fp32, chosen),
            Spec(fp32, (count, self.experts)),
        )

    @property
    def _stage_bytes(self) -> int:
        whole = (self.hidden_spec(self.rows), *self.route_specs(self.rows))
        return sum(aligned(spec.nbytes) for spec in whole)

    @property
    def _first_rows(self) -> int:
        return aligned((LAYERS + MOST_LAYERS + self.stages * LINE) * WORD)

    @property
    def mailbox_bytes(self) -> int:
        """Of the whole mailbox."""
        return self._first_rows + self.stages * self._stage_bytes

    @property
    def answers_bytes(self) -> int:
        """Of all that the rank writes."""
        return self._first_answer + self.buffers * self.buffer_bytes

    @property
    def buffer_bytes(self) -> int:
        """Of one answer of every stage."""
        return self.stages * aligned(self.hidden_spec(self.rows).nbytes)

    @property
    def _first_answer(self) -> int:
        return TEXT + MOST_TEXT + self.stages * LINE * WORD

    def header(self, stage: int) -> int:
        """The first word of a stage's header in the mailbox."""
        return LAYERS + MOST_LAYERS + stage * LINE

    def answer_header(self, stage: int) -> int:
        """The first word of a stage's header in the answers."""
        return (TEXT + MOST_TEXT) // WORD + stage * LINE

    def columns(self, stage: int) -> tuple[int, int, int, int]:
        """Where hidden states, ids, weights and logits of a stage begin in the mailbox."""
        at = self._first_rows + stage * self._stage_bytes
        places = [at]
        for spec in (self.hidden_spec(self.rows), *self.route_specs(self.rows)[:2]):
            places.append(places[-1] + aligned(spec.nbytes))
        return places[0], places[1], places[2], places[3]

    def answer(self, stage: int, buffer: int = 0) -> int:
        """Where the answers of a stage begin."""
        at = self._first_answer + buffer * self.buffer_bytes
        return at + stage * aligned(self.hidden_spec(self.rows).nbytes)


def tag_of(number: int, step: int) -> int:
    """The tag of a stage's step of pass `number`; steps are counted from 0."""
    return number << 32 | (step % LAST_NUMBER + 1)


def filled_of(tag: int, rows: int) -> int:
    """What ANSWERED is when so many rows of the answer with this tag are there; as in owner.cu. The lowest
    bits of the pass and the step tell it from what the stage's step before has left.
    """
    return (tag >> 32 & 0xFFFF) << 48 | (tag & 0xFFFF) << 32 | rows


def rows_answered(word: int, tag: int) -> int:
    """How many rows ANSWERED says are there of the answer with this tag."""
    return word & 0xFFFFFFFF if word >> 32 == filled_of(tag, 0) >> 32 else 0


_FENCE = threading.Lock()
_IN_ORDER = platform.machine() in ("x86_64", "AMD64", "i686")


def fence() -> None:
    """Keeps what was written or read before from being so after: between rows and their tag, on both sides.

    Some processors reorder stores, or loads; those of x86 do neither. To take a lock and leave it holds back
    what follows, and what was before; only twice keeps the two apart.
    """
    if _IN_ORDER:
        return
    for _ in range(2):
        with _FENCE:
            pass
