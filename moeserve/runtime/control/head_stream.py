"""`HeadStream`: a member's way to the head, over one stream after another: a head may end and start again."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from moeserve.proto.texts import clipped
from moeserve.runtime.control.stream import Message, Stream, StreamClosed

log = logging.getLogger(__name__)

LEAST_PAUSE, MOST_PAUSE = 0.02, 1.0  # seconds between two attempts to reach the head again


@dataclass(frozen=True)
class ReachAgain:
    """How a member reaches a head whose stream has ended.

    dial: a new stream to the head's address, within so many seconds; raises StreamClosed. hello: what a
    member says of itself first.
    """

    dial: Callable[[float], Stream]
    hello: Callable[[], Message]
    seconds: float  # for which the head may be away; 0: a member whose stream ends does not come back
    given_up: threading.Event = field(default_factory=threading.Event)  # whoever starts heads has ended


class HeadStream:
    """The stream that a member speaks on now. `send` is safe from several threads; one thread receives, and
    alone calls `come_back`.
    """

    def __init__(self, first: Stream, again: ReachAgain) -> None:
        self._stream, self._again = first, again
        self._lost_at: float | None = None  # when the head went away; None since it has said anything
        self._pause = LEAST_PAUSE

    def send(self, message: Message) -> None:
        """Sends one message. Raises StreamClosed; whoever receives then hears of the end, too."""
        stream = self._stream
        try:
            stream.send(message)
        except StreamClosed:
            stream.close()
            raise

    def receive(self) -> Message:
        """The next message of the head; blocks without a bound. Raises StreamClosed at the stream's end."""
        message = self._stream.receive()
        self._lost_at = None
        return message

    @property
    def followed(self) -> bool:
        """Whether what is received comes over a ring."""
        return self._stream.followed

    def take(self, kinds: Collection[str], seconds: float) -> Message | None:
        """The next message, as `Stream.take` gives it; by who receives, or instead of it."""
        message = self._stream.take(kinds, seconds)
        if message is not None:
            self._lost_at = None
        return message

    def wake(self) -> None:
        """Has the `take` under way return, or the next one; from any thread."""
        self._stream.wake()

    @property
    def ready(self) -> bool:
        """Whether the next message over the ring is there, or begins to come."""
        return self._stream.ready

    @property
    def waits(self) -> bool:
        """Whether `receive` has something to tell that `take` has left to it."""
        return self._stream.waits

    def close(self) -> None:
        """Closes the present stream; a thread blocked in `receive` gets StreamClosed."""
        self._stream.close()

    def come_back(self) -> bool:
        """Reaches the head that has started again, and is received there; False where none was found for as
        long as `ReachAgain.seconds`, counted from when the head was last heard.
        """
        self._stream.close()
        if self._lost_at is None:
            self._lost_at, self._pause = time.monotonic(), LEAST_PAUSE
        until = self._lost_at + self._again.seconds
        while (left := until - time.monotonic()) > 0:
            if self._again.given_up.wait(min(left, self._pause * random.uniform(0.5, 1.0))):
                log.info("whoever starts the head again has ended")
                return False
            self._pause = min(MOST_PAUSE, 2 * self._pause)
            try:
                self._stream = self._received(until)
            except StreamClosed as closed:
                log.info("the head is not back yet: %s", clipped(str(closed)))
                continue
            log.info("the head is reached again after %.2f s", time.monotonic() - self._lost_at)
            return True
        return False

    def _received(self, until: float) -> Stream:
        """A stream on which a head has taken this member's hello. Raises StreamClosed."""
        stream = self._again.dial(max(0.001, until - time.monotonic()))
        try:
            stream.send(self._again.hello() | {"again": True})
            if (answer := stream.receive_first(max(0.0, until - time.monotonic())))["kind"] != "welcome":
                raise StreamClosed(f"the head began with {clipped(repr(answer['kind']))}")
        except BaseException:
            stream.close()
            raise
        return stream
