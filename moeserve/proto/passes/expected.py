"""`Expected`: when a caller looks for the answers of a stage: asleep while none is likely, awake when one is.

A thread that sleeps is woken 50 to 100 us later than it asked for, as long as a small step takes; one that
looks all the time takes a core. So a caller sleeps until shortly before an answer should be there by what
the last ones took, and then looks again and again for a bounded time, where there are cores to spare.
"""

from __future__ import annotations

import time

from moeserve.proto.transports.awake import EARLY_SECONDS

LOOKS = 50
"""Looks one right after the other when an answer begins to be waited for."""

SHORTEST_SLEEP, LONGEST_SLEEP = 20e-6, 0.001
"""Between two looks. After the time in which it looks again and again, an eighth of the wait."""

SHORTER, SHORTEST = 0.9, 0.5
"""What is left of the expected time where the answer was there when its caller's sleep was over; less each
time in a row, and at least the second.
"""


class Expected:
    """The answers of one stage, over all passes; steps of about as many rows take about as long.

    awake: seconds for which the caller looks again and again; 0: it sleeps.
    """

    def __init__(self, awake: float) -> None:
        self.awake = awake
        self._known: dict[int, float] = {}  # seconds from rows to answer, by the bits of a number of rows
        self._rows = 0  # of the step that was sent last, in bits
        self._since = time.monotonic()
        self._missed = 0.0  # when an answer was last looked for in vain, after its rows
        self._shorter = SHORTER

    @property
    def seconds(self) -> float:
        """From rows to answer; 0: no step of about so many rows was waited for yet."""
        return self._known.get(self._rows, 0.0)

    def sent(self, rows: int) -> None:
        """A step's rows were sent."""
        self._since, self._rows, self._missed = time.monotonic(), rows.bit_length(), 0.0

    def sleep(self, now: float, looks: int) -> float:
        """Seconds to sleep before the next look, after so many in vain; 0: to look at once, after others'
        turn.
        """
        self._missed = waited = now - self._since
        if self.awake and looks < LOOKS:
            return 0.0
        expected = self.seconds
        before = expected - waited - (EARLY_SECONDS if self.awake else 0.0)
        if before > 0:
            return min(LONGEST_SLEEP, before)
        late = waited - expected
        if self.awake and expected and late < min(self.awake, EARLY_SECONDS + expected / 4):
            return 0.0
        return min(LONGEST_SLEEP, max(late / 8, waited / 16, SHORTEST_SLEEP))

    def came(self, *, awaited: bool, slept: bool) -> None:
        """The answer was found. awaited: it was not there at the first look. slept: it came while its caller
        slept, and did not wake it, so that nobody knows when.
        """
        took, expected = time.monotonic() - self._since, self.seconds
        if not awaited:
            expected = min(expected, took)  # its caller had other things to do
        elif slept:
            expected = max(self._missed, self._shorter * min(took, expected or took))
            self._shorter = max(SHORTEST, self._shorter**2)
        else:
            expected = expected + (took - expected) / 2 if took > expected > 0 else took
            self._shorter = SHORTER
        self._known[self._rows] = expected
