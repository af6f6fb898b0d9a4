"""`Admission`: how many calls, streams and bytes a door holds at once, and whose they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from moeserve.runtime.doors.calls.callers import Caller, Callers, Places
from moeserve.runtime.errors import LaneFull, pushback


@dataclass(frozen=True)
class DoorLimits:
    """What one door, of a lane or the front, holds at most."""

    calls: int = 256
    streams: int = 256
    nbytes: int = 2 << 30  # of the calls under way, by message or reply; a single one may have more
    request_seconds: float = 30.0  # within which a call's message has to arrive
    unread_seconds: float = 30.0  # within which the caller of a stream has to take a reply
    hello_seconds: float = 5.0  # within which a data connection has to be made, and to show its secret
    rest_seconds: float = 10.0  # without a call, after which a data connection holds no memory


class Admission:
    """Lets calls in. Safe from any thread.

    Once half of the room is taken, no connection may hold more than its share of it. Hosts that have calls
    here, or were refused lately, have even shares of the room, and so have the connections of one host: one
    that asks without a pause, or over many connections, takes no other host's. Whoever is refused is told
    when to come back: later after each refusal in a row, and never at the same time as others.
    """

    def __init__(self, limits: DoorLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._callers = Callers()
        self._calls = 0
        self._streams = Places()
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def held(self) -> tuple[int, int, int]:
        """Calls, streams and bytes that are held now."""
        return self._calls, len(self._streams), self._nbytes

    def enter(self, peer: str, nbytes: int, held: int = 0) -> Callable[[], None]:
        """Lets in a call of `nbytes` from the connection `peer`; returns what ends it, to be called once.

        held: bytes of it that `enlarge` has counted already; they count as the call's from now on. Raises
        LaneFull with the time to come back after.
        """
        now = self._clock()
        with self._lock:
            caller = self._callers.of(peer)
            why = self._why_not(caller, nbytes, held, now)
            if why:
                raise LaneFull(why, self._callers.refuse(caller, now))
            self._callers.enter(caller, 1)
            self._calls += 1
            self._nbytes += nbytes - held

        def leave() -> None:
            with self._lock:
                now = self._clock()
                self._callers.leave(caller, 1, now)
                self._calls -= 1
                self._nbytes -= nbytes
                self._callers.forget(2 * self.limits.calls, now)

        return leave

    def enlarge(self, peer: str, nbytes: int, more: int) -> Callable[[], None]:
        """Counts `more` bytes of a call of `peer` for which `nbytes` count: one that was let in, or is on its
        way. Returns what ends that. Raises LaneFull as `enter`.
        """
        now = self._clock()
        with self._lock:
            if not self._fits(nbytes + more, nbytes):
                caller = self._callers.of(peer)
                raise LaneFull(self._no_room(nbytes + more), self._callers.refuse(caller, now))
            self._nbytes += more
        return lambda: self.let_go(more)

    def hold(self, nbytes: int) -> bool:
        """Notes `nbytes` more, of a call on a stream; False where there is no room for them now."""
        with self._lock:
            fits = self._fits(nbytes)
            if fits:
                self._nbytes += nbytes
            return fits

    def let_go(self, nbytes: int) -> None:
        """So many bytes that were held are held no more."""
        with self._lock:
            self._nbytes -= nbytes

    def open_stream(self, peer: str) -> Callable[[], None]:
        """Lets in a stream of the caller at `peer`; returns what ends it, to be called once.

        Raises LaneFull where too many are open, or this caller or its host has its part.
        """
        with self._lock:
            self.check_place(peer, self._streams, "streams are open")
            self._streams.take(peer)

        def close() -> None:
            with self._lock:
                self._streams.give(peer)

        return close

    def check_place(self, peer: str, there: Places, what: str) -> None:
        """Raises LaneFull where the caller at `peer` may have no more of what there may be as many of as
        streams.
        """
        if why := there.why_not(peer, self.limits.streams, what):
            raise LaneFull(f"{why} (server.max_streams)", pushback(1))

    def _no_room(self, nbytes: int) -> str:
        return (
            f"{nbytes} bytes do not fit: calls of {self._nbytes} bytes are under way, and "
            f"server.max_held_bytes is {self.limits.nbytes}"
        )

    def _fits(self, nbytes: int, held: int = 0) -> bool:
        """Whether there is room for a call of so many bytes, for which `held` count already."""
        others = self._nbytes - held
        return not others or others + nbytes <= self.limits.nbytes

    def _why_not(self, caller: Caller, nbytes: int, held: int, now: float) -> str:
        """Why no call of `nbytes` from `caller` is let in now; empty where one is."""
        limits = self.limits
        if self._calls >= limits.calls:
            return f"{self._calls} calls are under way, as many as server.max_concurrent_calls allows"
        if not self._fits(nbytes, held):
            return self._no_room(nbytes)
        if 2 * self._calls >= limits.calls:
            wanting = self._callers.wanting(caller, now)
            share = max(1.0, self._callers.share(caller, wanting, limits.calls))
            if caller.calls + 1 > share:
                return (
                    f"this connection has {caller.calls} calls under way, and its share of "
                    f"{limits.calls} among {len(wanting)} connections is {share:.0f}"
                )
        return ""
