"""`MemberDrain`: a member's lane and its doors take no further call, and it says when they have none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from moeserve.runtime.control.stream import Message
from moeserve.runtime.rank.lanes.lane import Lane

LOOK_SECONDS = 0.01  # between looks for calls under way, once no further one is taken


class MemberDrain:
    """One member's. `told` by the thread that receives; it does not wait."""

    def __init__(self, lane: Lane | None, tell: Callable[[Message], None]) -> None:
        """lane: None: this member takes no calls. tell: sends to the head."""
        self._lane, self._tell = lane, tell
        self._last: Message | None = None  # word on whether calls are taken
        self._lock = threading.Lock()  # a lane that takes calls again is not drained for what was said before
        # doors begin no further call; without a reason they do again
        self.on_drain: Callable[[str], None] = lambda reason: None
        self.doors_busy: Callable[[], bool] = lambda: False  # a call has begun there and is not over

    def told(self, message: Message) -> None:
        """Takes no further call, or takes calls again where there is no reason for that any more."""
        reason = message["reason"]
        with self._lock:
            self._last = message
            if self._lane is not None and not reason:
                self._lane.drain("")
        if self._lane is not None:
            self.on_drain(reason)
        if reason:
            threading.Thread(target=self._end, args=(message,), name="drain", daemon=True).start()

    def _end(self, message: Message) -> None:
        """Says when the calls under way have ended. It has a thread of its own, and steps go on meanwhile."""
        if self._lane is not None:
            until = time.monotonic() + message["seconds"]
            while (self._lane.in_flight or self.doors_busy()) and time.monotonic() < until:
                if self._last is not message:
                    return
                time.sleep(LOOK_SECONDS)
            with self._lock:
                if self._last is not message:
                    return
                self._lane.drain(message["reason"])
        self._tell({"kind": "drained", "generation": message["generation"]})
