"""The words of a device lane, as its caller writes and reads them."""

from __future__ import annotations

import time

from moeserve.proto.passes import mailbox as m
from moeserve.proto.passes.mailbox import MailboxLayout, Status
from moeserve.runtime.doors.passes.announced import AnnouncedLane, LaneMemory
from moeserve.runtime.doors.payloads import Regions


class LaneWords:
    """A caller's side of `lane`, which its owner sets."""

    lane: AnnouncedLane
    quiet = True  # whether nobody uses the answers
    number = 0  # of the pass that was announced last

    def memory_of(self, regions: Regions, layout: MailboxLayout) -> LaneMemory:
        """The lane's memory, whose words are this caller's."""
        sizes = layout.mailbox_bytes, layout.answers_bytes
        names = [regions.create(size)[0] for size in sizes]
        box, out = (regions.hold(name, 0, size) for name, size in zip(names, sizes, strict=True))
        self.box, self.out = box.memory.cast("B").cast("Q"), out.memory.cast("B").cast("Q")
        return LaneMemory(*names, (box, out), layout, lambda: self.quiet)

    def announce(self, layers: list[int], stages: int = 1, flags: int = 0, version: int = 0) -> None:
        """Announces the next pass, which the lane looks at."""
        self.announce_unseen(layers, stages, flags, version)
        self.look()

    def announce_unseen(self, layers: list[int], stages: int = 1, flags: int = 0, version: int = 0) -> None:
        """Announces the next pass."""
        self.number += 1
        words = {m.STEPS: len(layers), m.STAGES: stages, m.FLAGS: flags, m.WANTED_VERSION: version}
        words |= {m.LAYERS + at: layer for at, layer in enumerate(layers)} | {m.ANNOUNCED: self.number}
        for at, value in words.items():
            self.box[at] = value

    def look(self, later: float = 0.0) -> bool:
        """Has the lane look at the words, so many seconds later."""
        return self.lane.look(time.monotonic() + later)

    @property
    def ended(self) -> tuple[Status, str] | None:
        """How the pass that was announced last has ended."""
        if self.out[m.ENDED] != self.number:
            return None
        text = self.out.cast("B")[m.TEXT : m.TEXT + self.out[m.TEXT_BYTES]]
        return Status(self.out[m.STATUS]), bytes(text).decode()
