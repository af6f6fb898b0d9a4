"""`Awake`: when a thread that waits for the other end of a connection looks again and again before it sleeps.

A thread that sleeps is woken 50 to 100 us after what it waits for has come, and later where its core sleeps
too: as long as a small step takes. One that looks all the time takes a core. So it is awake about when the
other end should answer, by what that took before, for a bounded time, where there are cores to spare.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from moeserve.proto.host import usable_cores
from moeserve.proto.transports.fine_poll import Found

SPARE_CORES = 4
"""From which on a waiting thread may be awake: with fewer it would take one from who computes its answer."""

EARLY_SECONDS = 0.0001
"""How much before an answer is expected its caller is awake."""

MOST_AWAKE_SECONDS = 0.0005
"""For which it looks again and again from when the answer is expected, unless it is told another time. It is
no longer than a quarter of what answers take and `EARLY_SECONDS`.
"""

MOST_AWAKE = 1.0
"""Seconds; more may not be asked for."""

LONGEST_SECONDS = 0.005
"""What takes longer is waited for asleep: to be woken takes little of it."""

Poll = Callable[[float | None], Found]
"""As of `FinePoll`: within milliseconds and parts of one, None: whenever; [] where nothing has come."""


def awake_seconds() -> float:
    """How long a caller of this process is awake at most for an answer, where it does not say so itself."""
    return MOST_AWAKE_SECONDS if usable_cores() >= SPARE_CORES else 0.0


class Awake:
    """What one other end says, and how long it takes to. One thread at a time uses it."""

    def __init__(self, seconds: float | None = None) -> None:
        """seconds: for which it looks again and again; 0: never; None: `awake_seconds`."""
        self._awake = awake_seconds() if seconds is None else seconds
        self._since = -math.inf
        self.expected = math.inf  # seconds that it takes; a little less than most of the last ones took

    def begins(self) -> None:
        """The other end was told something, or given something to do."""
        self._since = time.monotonic()

    def wait(self, poll: Poll, limit: float | None = None) -> Found:
        """What a poll gives that finds something within so many milliseconds; [] where none does."""
        found = poll(0)
        if not found and self.expected <= LONGEST_SECONDS and self._awake:
            end = math.inf if limit is None else time.monotonic() + limit / 1000
            found = self._looked(poll, end)
            limit = None if limit is None else 1000 * max(0.0, end - time.monotonic())
        if not found:
            found = poll(limit)
        took = time.monotonic() - self._since
        if took <= self.expected:
            self.expected = took
        else:  # one that took long, once, changes little
            self.expected += min(took - self.expected, self.expected) / 4
        return found

    def _looked(self, poll: Poll, end: float) -> Found:
        """What was found about when it was expected, until `end` at most. Between two looks others have their
        turn: a thread that asks for the interpreter again at once would keep it from those who wait for it.
        """
        expected = self.expected
        if expected > self._awake:  # what comes sooner than before wakes it, and is expected sooner at once
            early = min(self._since + expected - EARLY_SECONDS, end) - time.monotonic()
            if early > 0 and (found := poll(1000 * early)):
                return found
        now = time.monotonic()
        until = min(self._since + expected + EARLY_SECONDS + expected / 4, now + self._awake, end)
        while now < until:
            if found := poll(0):
                return found
            time.sleep(0)
            now = time.monotonic()
        return []
