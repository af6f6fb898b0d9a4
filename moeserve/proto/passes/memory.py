"""`LaneMemory`: the memory of a device lane as its caller has it mapped."""

from __future__ import annotations

from moeserve.proto import moe_pb2
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.futex import Words
from moeserve.proto.passes.mailbox import MailboxLayout
from moeserve.proto.tensors import Plain, Spec
from moeserve.proto.transports.shared_memory import RemoteRegion, SharedTensor

Room = tuple[Plain, Plain, Plain, Plain]
"""Hidden states, ids int32, weights and logits float32 of a stage's rows, in a mailbox."""

Specs = tuple[Spec, Spec, Spec, Spec]
"""Of the same."""

MOST_MADE = 256
"""Stages and numbers of rows whose places in memory are kept."""

LAST_BELL = 2**32 - 1


class LaneMemory:
    """A mailbox, which the caller writes, and answers, which the rank writes.

    box, out: their words of 64 bits, each read and written at once.
    """

    def __init__(self, layout: MailboxLayout, made: moe_pb2.AttachLaneReply) -> None:
        """Maps both regions. Raises MoeError where the rank does not hand them over."""
        self.layout = layout
        self._made: dict[tuple[int, int, int], tuple[Room, Plain]] = {}  # by stage, rows and buffer
        self._mailbox = RemoteRegion.open(_region(made.mailbox, made.mailbox_bytes, made.socket))
        try:
            self._answers = RemoteRegion.open(_region(made.answers, made.answers_bytes, made.socket))
        except BaseException:
            self._mailbox.close()
            raise
        self.box = self._mailbox.bytes().cast("Q")
        self.out = self._answers.bytes().cast("Q")
        # whether the rank begins with rows while others are copied, and says how many of an answer are there
        self.fills = made.goes_ahead and bool(self.out[m.TAKES] & m.TAKES_FILLED)
        self.buffers = layout.buffers if self.out[m.TAKES] & m.TAKES_BUFFER else 1  # of answers
        self.words = Words(self.out)  # which their writer may wake
        self._written = Words(self.box)

    @property
    def process(self) -> int:
        """That has attached the lane; a child that it forks has it mapped, too, and may not write there."""
        return self._mailbox.process

    @property
    def alive(self) -> bool:
        """Whether the rank's process keeps the lane."""
        return self._mailbox.alive and self._answers.alive

    def end(self) -> None:
        """Lets the memory go: who waits for an answer finds it as after the end of the rank's process."""
        self._mailbox.end()
        self._answers.end()

    def room(self, stage: int, rows: int) -> Room:
        """Memory of the mailbox for so many rows of a stage: hidden states, ids, weights, logits."""
        return self._places(stage, rows)[0]

    def specs(self, rows: int) -> Specs:
        """Of so many rows with their route, of one step or of several."""
        if rows > self.layout.rows:
            return self.layout.hidden_spec(rows), *self.layout.route_specs(rows)
        hidden, ids, weights, logits = self.room(0, rows)
        return hidden.spec, ids.spec, weights.spec, logits.spec

    def answer(self, stage: int, rows: int, buffer: int = 0) -> Plain:
        """Memory that holds a stage's answer."""
        return self._places(stage, rows, buffer)[1]

    def answer_bytes(self, buffer: int, nbytes: int) -> memoryview:
        """The first bytes of an answer buffer."""
        at = self.layout.answer(0, buffer)
        return self._answers.bytes()[at : at + nbytes]

    def _places(self, stage: int, rows: int, buffer: int = 0) -> tuple[Room, Plain]:
        """Both, made once for a number of rows: to make them takes as long as to fill them with a few."""
        found = self._made.get((stage, rows, buffer))
        if found is None:
            layout = self.layout
            specs = (layout.hidden_spec(rows), *layout.route_specs(rows))
            hidden, ids, weights, logits = map(self._mailbox.view, layout.columns(stage), specs)
            answer = self._answers.view(layout.answer(stage, buffer), layout.hidden_spec(rows))
            if len(self._made) >= MOST_MADE:
                self._made.clear()
            found = self._made[stage, rows, buffer] = (hidden, ids, weights, logits), answer
        return found

    def placed(self, stage: int, rows: int, rank: int) -> tuple[SharedTensor, SharedTensor]:
        """The same places of hidden states and answer as tensors of rank `rank`, whose memory it is."""
        spec, layout = self.layout.hidden_spec(rows), self.layout
        hidden = SharedTensor(self._mailbox, layout.columns(stage)[0], spec, rank)
        answer = SharedTensor(self._answers, layout.answer(stage), spec, rank)
        (_, ids, weights, logits), _ = self._places(stage, rows)
        # the same objects from here on: to compare addresses takes as long as to copy a row
        self._made[stage, rows, 0] = (hidden.plain, ids, weights, logits), answer.plain
        return hidden, answer

    @property
    def bytes(self) -> tuple[memoryview, memoryview]:
        """All of the mailbox and of the answers, mapped for as long as the lane."""
        return self._mailbox.bytes(), self._answers.bytes()

    def ring(self) -> None:
        """Wakes the rank, where it waits for what the caller writes."""
        self._written.write(m.BELL, self.box[m.BELL] % LAST_BELL + 1)

    def give_up(self, number: int) -> None:
        """Says that the caller ends this pass."""
        self.box[m.GIVEN_UP] = number
        self.ring()

    def text(self) -> str:
        """What the rank said of the pass that ended last."""
        length = min(self.out[m.TEXT_BYTES], m.MOST_TEXT)
        return bytes(self._answers.bytes()[m.TEXT : m.TEXT + length]).decode(errors="replace")

    def close(self) -> None:
        """Ends the leases on both."""
        self._made.clear()
        self._mailbox.close()
        self._answers.close()


def _region(name: str, size: int, socket: str) -> moe_pb2.CreateRegionReply:
    return moe_pb2.CreateRegionReply(name=name, size=size, socket=socket)
