"""`Kept`: the idle connections that a client keeps to one lane, and whether another may be opened."""

from __future__ import annotations

import time
from collections import deque
from typing import Generic, Protocol, TypeVar

from moeserve.proto.errors import Overloaded

OPEN_SECONDS = 1.0
"""For a lane to open a connection; calls go by gRPC where it does not."""

FEWEST_SECONDS = 0.2
"""In which a lane that is well opens one: what takes longer is not tried again for a while."""

AGAIN_SECONDS = 30.0
"""After a connection could not be opened, until it is tried again."""

MOST_IDLE, IDLE_SECONDS = 64, 60.0
"""Connections that a client keeps for further calls to a lane, and for how long."""


class Keepable(Protocol):
    """A connection."""

    @property
    def fresh(self) -> bool:
        """Whether the lane keeps it, as far as is seen here, and this process alone uses it."""

    @property
    def closed(self) -> bool:
        """Whether it is of no use any more."""

    def close(self) -> None:
        """Ends it."""


C = TypeVar("C", bound=Keepable)


def seconds_to_open(timeout: float) -> float:
    """That a call which has so many leaves for a connection: its other half is for the way by gRPC."""
    return min(OPEN_SECONDS, timeout / 2)


class Kept(Generic[C]):
    """Safe to use from any thread."""

    def __init__(self) -> None:
        self._idle = deque[tuple[float, C]]()  # with since when
        self._again = 0.0  # when one may be opened
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether none is kept any more."""
        return self._closed

    @property
    def may_open(self) -> bool:
        """Whether another may be."""
        return not self._closed and time.monotonic() >= self._again

    @property
    def likely(self) -> bool:
        """Whether a call has a connection, as far as is known."""
        return bool(self._idle) or time.monotonic() >= self._again

    def idle(self) -> C | None:
        """The one that was used last of those that nobody uses."""
        while self._idle:
            try:
                since, found = self._idle.pop()
            except IndexError:  # another thread has it
                break
            if found.fresh and since > time.monotonic() - IDLE_SECONDS:
                return found
            found.close()
        return None

    def refused(self, error: Exception, given: float = OPEN_SECONDS) -> None:
        """One could not be opened in the seconds `given` for it: no other is for a while, unless these were
        so few that it says nothing of the lane.
        """
        if isinstance(error, TimeoutError) and given < FEWEST_SECONDS:
            return
        seconds = OPEN_SECONDS if isinstance(error, Overloaded) else AGAIN_SECONDS
        self._again = time.monotonic() + seconds

    def give(self, connection: C) -> None:
        """Keeps one whose call was answered."""
        if connection.closed:
            return
        if self._closed or len(self._idle) >= MOST_IDLE:
            connection.close()
        else:
            self._idle.append((time.monotonic(), connection))
            self._sweep()

    def _sweep(self) -> None:
        """Closes what nobody has used for long: a lane has so many connections."""
        try:
            while self._idle[0][0] < time.monotonic() - IDLE_SECONDS:
                self._idle.popleft()[1].close()
        except IndexError:  # another thread has it
            pass

    def close(self) -> None:
        """Closes the idle ones, and those that come back later."""
        self._closed = True
        while self._idle:
            try:
                self._idle.pop()[1].close()
            except IndexError:
                break
