"""`Clock`: how much of a bench's time is left, and how many passes of a case fit into its share."""

from __future__ import annotations

import time

LEAST_PASSES = 4


class Clock:
    """Counts from when it is made. seconds: of the whole run."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds; less than 0 when the time is over."""
        return self._end - time.monotonic()

    def passes(self, wanted: int, seconds: float, cases: int) -> int:
        """How many passes of `seconds` each a case may make, of which so many cases are left, this one too;
        0 where its time is over.
        """
        share = self.left / max(1, cases)
        fit = int(share / max(seconds, 1e-6))
        return min(wanted, fit) if fit >= LEAST_PASSES else 0
