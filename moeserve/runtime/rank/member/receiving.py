"""`Receiving`: the thread in which a member hears one head after another, also while a step runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from moeserve.runtime.control.head_stream import HeadStream
from moeserve.runtime.control.stream import Message, Stream, StreamClosed
from moeserve.runtime.keys.access import Frames, known_frame
from moeserve.runtime.rank.member.entries import Entries

log = logging.getLogger(__name__)

Acts = Mapping[str, Callable[[Message], None]]
"""By a message's kind, what is done with it."""


class Receiving:
    """Hands what comes to the thread that executes entries, in the head's order.

    `at_once`: what this thread does itself with messages that are no entries. `first`: what it does before it
    hands an entry on. `index` is the rank's seat.
    """

    def __init__(
        self, index: int, stream: Stream | HeadStream, entries: Entries, at_once: Acts, first: Acts
    ) -> None:
        self._index, self._stream, self._entries = index, stream, entries
        self._at_once, self._first = at_once, first
        self._told_to_stop = False
        self.heads = 0  # that came after the first
        self.on_lost: Callable[[str], None] = lambda why: None  # the head's stream has ended
        # whether a head is there again that has taken this member's hello
        self.come_back: Callable[[], bool] = lambda: False
        self.on_found: Callable[[], None] = lambda: None  # it is
        self.on_end: Callable[[str], None] = lambda why: None  # nothing will be received any more

    def run(self) -> None:
        """Receives until the head says stop, or none comes back; then the rank stops."""
        try:
            why = self._take_entries()
            while not self._told_to_stop:
                log.warning("rank %d: %s", self._index, why)
                self.on_lost(why)
                self._entries.put({"kind": "abort"})
                if not self.come_back():
                    break
                self.heads += 1
                self.on_found()
                why = self._take_entries()
        except Exception as error:
            log.exception("rank %d: the thread that receives entries ends, and with it the rank", self._index)
            why = f"an entry of the coordinator could not be taken: {type(error).__name__}: {error}"
        self.on_end(why)
        self._entries.put({"kind": "stop"})

    def _take_entries(self) -> str:
        """Receives from one head. Returns why the stream ended."""
        try:
            while True:
                self._entries.await_turn()
                message = self._stream.receive()
                kind = message["kind"]
                known_frame(Frames.TO_RANK, kind)
                if (act := self._at_once.get(kind)) is not None:
                    act(message)
                    continue
                if (act := self._first.get(kind)) is not None:
                    act(message)
                elif kind == "load":
                    message = message | {"heads": self.heads}
                elif kind == "stop":
                    self._told_to_stop = True
                self._entries.put(message)
        except StreamClosed as closed:
            return f"the coordinator is gone: {closed}"
