"""`Pace`: how long calls have lately taken at a lane, by the rows that were ahead of them."""

from __future__ import annotations

import math

KEPT = 0.98  # of the weight of earlier calls, with each call that ends: about the last fifty count
FEWEST = 3.0  # calls, by their weight, from which anything is foretold
FRESH_SECONDS = 5.0  # after the last call ended nothing is foretold
DEVIATIONS = 4.0  # mean deviations beside what is foretold, as TCP has them for its time-outs
FARTHEST = 2.0  # times the most rows that were seen lately: beyond, nothing is foretold


class Pace:
    """A line through (rows, seconds) of calls that ended lately, and how far they were from it.

    rows: a call's own and those ahead of it. No clock and no lock of its own.
    """

    def __init__(self) -> None:
        self._last = -math.inf
        self._forget()

    def _forget(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._most = self._deviation = 0.0

    def note(self, rows: int, seconds: float, now: float) -> None:
        """A call with so many rows, those ahead of it included, took `seconds`."""
        if now - self._last > FRESH_SECONDS:
            self._forget()
        if self._weight:
            base, slope = self._line()
            self._deviation += 0.05 * (abs(seconds - base - slope * rows) - self._deviation)
        self._weight = KEPT * self._weight + 1
        self._x, self._y = KEPT * self._x + rows, KEPT * self._y + seconds
        self._xx, self._xy = KEPT * self._xx + rows * rows, KEPT * self._xy + rows * seconds
        self._most = max(KEPT * self._most, rows)
        self._last = now

    def foretold(self, rows: float, now: float) -> float:
        """Seconds within which a call with so many rows, those ahead of it included, will have ended.

        0 where too little is known: nobody is refused for a guess.
        """
        if self._weight < FEWEST or now - self._last > FRESH_SECONDS:
            return 0.0
        base, slope = self._line()
        return base + slope * min(rows, self.seen) + DEVIATIONS * self._deviation

    @property
    def seen(self) -> float:
        """The most rows for which anything is foretold."""
        return FARTHEST * self._most

    def room(self, seconds: float, now: float) -> float:
        """The rows that may be ahead of a call, its own included, that has to end within `seconds`.

        Infinite where too little is known: where it is more than can be foretold.
        """
        if not self.foretold(0, now):
            return math.inf
        base, slope = self._line()
        left = max(0.0, seconds - base - DEVIATIONS * self._deviation)
        return left / slope if left < slope * self.seen else math.inf

    def _line(self) -> tuple[float, float]:
        """Seconds at no rows, and seconds a row: never negative."""
        x, y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - x * x
        if spread <= 1e-4 * x * x:
            return 0.0, y / x
        slope = max(0.0, (self._xy / self._weight - x * y) / spread)
        base = y - slope * x
        return (base, slope) if base >= 0 else (0.0, y / x)
