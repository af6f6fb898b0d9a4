"""`Expected`: when a caller looks for the answers of a stage: asleep while none is likely, awake when one is.

A thread that sleeps is woken 50 to 100 us later than it asked for, as long as a small step takes; one that
looks all the time takes a core. So a caller sleeps until shortly before an answer should be there by what
the last ones took, and then looks again and again for a bounded time, where there are cores to spare.
"""

from __future__ import annotations

import os
import time

SPARE_CORES = 4
"""From which on a caller may be awake: with fewer it would take one from who computes its answer."""

LOOKS = 50
"""Looks one right after the other when an answer begins to be waited for."""

EARLY_SECONDS = 0.0001
"""How much before an answer is expected its caller is awake."""

MOST_AWAKE_SECONDS = 0.0005
"""For which it looks again and again from when the answer is expected, unless it is told another time. It is
no longer than a quarter of what answers take and `EARLY_SECONDS`.
"""

SHORTEST_SLEEP, LONGEST_SLEEP = 20e-6, 0.001
"""Between two looks. After the time in which it looks again and again, an eighth of the wait."""

SHORTER = 0.9
"""What is left of the expected time where the answer was there when its caller's sleep was over."""


def awake_seconds() -> float:
    """How long a caller of this process is awake at most for an answer, where it does not say so itself."""
    return MOST_AWAKE_SECONDS if len(os.sched_getaffinity(0)) >= SPARE_CORES else 0.0


class Expected:
    """The answers of one stage. awake: seconds for which its caller looks again and again; 0: it sleeps."""

    def __init__(self, awake: float) -> None:
        self.seconds = 0.0  # from rows to answer; 0: none was waited for yet
        self._awake = awake
        self._since = time.monotonic()

    def sent(self) -> None:
        """A step's rows were sent."""
        self._since = time.monotonic()

    def sleep(self, now: float, looks: int) -> float:
        """Seconds to sleep before the next look, after so many; 0: to look at once, after others' turn."""
        if self._awake and looks < LOOKS:
            return 0.0
        waited = now - self._since
        before = self.seconds - waited - (EARLY_SECONDS if self._awake else 0.0)
        if before > 0:
            return min(LONGEST_SLEEP, before)
        late = waited - self.seconds
        if self._awake and self.seconds and late < min(self._awake, EARLY_SECONDS + self.seconds / 4):
            return 0.0
        return min(LONGEST_SLEEP, max(late / 8, waited / 16, SHORTEST_SLEEP))

    def came(self, *, awaited: bool, slept: bool) -> None:
        """The answer was found. awaited: it was not there at the first look. slept: it came while its caller
        slept, and did not wake it.
        """
        took = time.monotonic() - self._since
        if not awaited:
            self.seconds = min(self.seconds, took)  # its caller had other things to do
        elif not self.seconds:
            self.seconds = SHORTER * took if slept else took
        elif slept and took < self.seconds + EARLY_SECONDS:
            self.seconds = SHORTER * min(took, self.seconds)
        elif took < self.seconds:
            self.seconds = took
        else:
            self.seconds += (took - self.seconds) / 2
