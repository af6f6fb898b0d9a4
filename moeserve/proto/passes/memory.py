"""`LaneMemory`: the memory of a device lane as its caller has it mapped."""

from __future__ import annotations

from moeserve.proto import moe_pb2
from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import MailboxLayout
from moeserve.proto.tensors import Plain, Spec
from moeserve.proto.transports.shared_memory import RemoteRegion


class LaneMemory:
    """A mailbox, which the caller writes, and answers, which the rank writes.

    box, out: their words of 64 bits, each read and written at once.
    """

    def __init__(self, layout: MailboxLayout, made: moe_pb2.AttachLaneReply) -> None:
        """Maps both regions. Raises MoeError where the rank does not hand them over."""
        self.layout = layout
        self._mailbox = RemoteRegion.open(_region(made.mailbox, made.mailbox_bytes, made.socket))
        try:
            self._answers = RemoteRegion.open(_region(made.answers, made.answers_bytes, made.socket))
        except BaseException:
            self._mailbox.close()
            raise
        self.box = self._mailbox.bytes().cast("Q")
        self.out = self._answers.bytes().cast("Q")

    @property
    def alive(self) -> bool:
        """Whether the rank's process keeps the lane."""
        return self._mailbox.alive and self._answers.alive

    def view(self, place: int, spec: Spec) -> Plain:
        """Memory of the mailbox."""
        return self._mailbox.view(place, spec)

    def answer(self, stage: int, rows: int) -> Plain:
        """Memory that holds a stage's answer."""
        return self._answers.view(self.layout.answer(stage), self.layout.hidden_spec(rows))

    @property
    def bytes(self) -> tuple[memoryview, memoryview]:
        """All of the mailbox and of the answers, mapped for as long as the lane."""
        return self._mailbox.bytes(), self._answers.bytes()

    def text(self) -> str:
        """What the rank said of the pass that ended last."""
        length = min(self.out[m.TEXT_BYTES], m.MOST_TEXT)
        return bytes(self._answers.bytes()[m.TEXT : m.TEXT + length]).decode(errors="replace")

    def close(self) -> None:
        """Ends the leases on both."""
        self._mailbox.close()
        self._answers.close()


def _region(name: str, size: int, socket: str) -> moe_pb2.CreateRegionReply:
    return moe_pb2.CreateRegionReply(name=name, size=size, socket=socket)
