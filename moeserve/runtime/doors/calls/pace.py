"""`Pace`: how long calls have lately taken at a lane, by the rows that were ahead of them."""

from __future__ import annotations

import math

KEPT = 0.98  # of the weight of earlier calls, with each call that ends: about the last fifty count
FRESH_SECONDS = 5.0  # after the last call ended nothing is foretold
DEVIATIONS = 1.0  # mean deviations beside the mean: calls of one step differ by when they came
FARTHEST = 2.0  # times the rows of the largest call that ended: of a larger one no more is foretold
SPARED = 0.7  # of its time: where no call has used more, more rows are let in
MORE = 1.5  # times as many
BETTER = 0.97  # of the pace before: what more rows have to make of it
TRIED_SECONDS = 5.0  # after more rows were too many they are not tried again
LEAST_SECONDS = 1.0  # for so long, and at most twice, the shortest time of a call is remembered


class Pace:
    """Seconds a row, of calls that ended lately, and how far single calls were from it.

    rows: a call's own and those ahead of it. A step of many rows takes less a row than one of few. So what
    few rows took foretells too much for many, and the pace is found by letting in more and more: it never
    foretells too little because it has seen only light load. No clock and no lock of its own.
    """

    def __init__(self) -> None:
        self._last = -math.inf
        self._forget()

    def _forget(self) -> None:
        self._rows = self._seconds = self._off = 0.0  # sums, of earlier calls less and less
        # the shortest time since `_since`, and in the time before, each with the rows of that call
        self._least = [(math.inf, 0), (math.inf, 0)]
        self._since = -math.inf

    def note(self, rows: int, seconds: float, now: float, *, ended: bool = True) -> None:
        """A call with so many rows, those ahead of it included, took `seconds`, or more where it has not
        `ended`: where that is less than was foretold it says nothing.
        """
        if now - self._last > FRESH_SECONDS:
            self._forget()
        if not ended and seconds <= self.foretold(rows, now):
            return
        off = abs(seconds - rows * self._seconds / self._rows) if self._rows else 0.0
        self._rows, self._seconds = KEPT * self._rows + rows, KEPT * self._seconds + seconds
        self._off = KEPT * self._off + off
        if now - self._since > LEAST_SECONDS:
            self._since, self._least = now, [(math.inf, 0), self._least[0]]
        self._least[0] = min(self._least[0], (seconds, rows))
        self._last = now

    def a_row(self, now: float) -> float:
        """Seconds a row within which nearly every call has ended; 0 where nothing is known."""
        if not self._rows or now - self._last > FRESH_SECONDS:
            return 0.0
        return (self._seconds + DEVIATIONS * self._off) / self._rows

    def least(self, rows: float, now: float) -> float:
        """Seconds that even the quickest call lately took; less for fewer rows than it had, those ahead of it
        included: what it waited for is not before them. 0 where nothing is known.
        """
        seconds, its = min(self._least)
        return seconds * min(1.0, rows / its) if self.a_row(now) and its else 0.0

    def foretold(self, rows: float, now: float) -> float:
        """Seconds within which a call with so many rows, those ahead of it included, will have ended.

        0 where nothing is known: nobody is refused for a guess.
        """
        return max(self.least(rows, now), self.a_row(now) * rows)


class Slack:
    """How many times more rows than the pace allows are let in, while that makes the pace better.

    Where a step takes as long with few rows as with many, a lane that holds few goes on to hold few: its pace
    tells that more would take longer. So more are tried while calls end with time to spare, and again fewer
    where that made no row quicker, or calls took longer than they should. No clock and no lock of its own.
    """

    def __init__(self) -> None:
        self.times = 1.0
        self._since = -math.inf  # when it was last another
        self._before = math.inf  # the pace before more rows were let in, where that was the last change
        self._again = -math.inf  # when more may be tried
        self._begin(-math.inf)

    def _begin(self, now: float) -> None:
        self._since = now
        self._rows = self._seconds = self._used = 0.0  # of calls that entered since

    def note(self, rows: int, took: float, seconds: float, now: float) -> None:
        """A call with so many rows, those ahead of it included, `took` some of the `seconds` that it had."""
        if took >= seconds:
            self.times, self._before = max(1.0, self.times / MORE), math.inf
            self._again = now + TRIED_SECONDS
            self._begin(now)
        elif now - took >= self._since:
            self._rows, self._seconds = self._rows + rows, self._seconds + took
            self._used = max(self._used, took / seconds)

    def refused(self, oldest: float, now: float) -> None:
        """A call is refused for want of time; the oldest one that is held entered then."""
        if oldest < self._since or not self._rows:
            return  # nobody knows yet what the last change has done
        pace, before, self._before = self._seconds / self._rows, self._before, math.inf
        if pace > BETTER * before:
            self.times, self._again = max(1.0, self.times / MORE), now + TRIED_SECONDS
            self._begin(now)
            return
        if 0.0 < before < math.inf:
            self.times = max(1.0, self.times * pace / before)  # the pace itself now allows so many more
        if self._used < SPARED and now >= self._again:
            self.times, self._before = self.times * MORE, pace
        self._begin(now)
