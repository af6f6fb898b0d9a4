"""`Refusals`: for which calls a client of lanes asks no rank for one now, since a rank has refused it."""

from __future__ import annotations

import time

REFUSED_SECONDS = 5.0
"""After a rank has refused a lane, until one is asked for again; and after a lane's last call, until it may
go for one of another dtype or rank.
"""

LIMITED_SECONDS = 60.0
"""After a rank was seen to take no more than so many rows, until it is asked for more again."""

Kind = tuple[str, int | None]
"""The dtype of hidden states, and whose lane it has to be; None: anybody's."""


class Refusals:
    """What was refused, and until when that counts. Safe to use from any thread.

    Lanes for several steps of a call are refused by themselves: they need more memory than those for one.
    """

    def __init__(self) -> None:
        self._until = [0.0, 0.0]  # by whether the lane was for several steps
        self._limits: dict[Kind, tuple[int, float]] = {}

    def asks(self, kind: Kind, rows: int, *, several: bool) -> bool:
        """Whether a rank is asked for a lane for a call of so many rows."""
        return time.monotonic() >= self._until[several] and rows <= self.limit(kind, rows)

    def limit(self, kind: Kind, most: int) -> int:
        """The most rows of a call for which a lane is asked for, and no more than `most`."""
        rows, until = self._limits.get(kind, (most, 0.0))
        return min(rows, most) if time.monotonic() < until else most

    def limited(self, kind: Kind, rows: int) -> None:
        """A rank takes no more rows of a call."""
        self._limits[kind] = self.limit(kind, rows), time.monotonic() + LIMITED_SECONDS

    def refused(self, *, several: bool) -> None:
        """A rank gives no lane now."""
        self._until[several] = time.monotonic() + REFUSED_SECONDS
