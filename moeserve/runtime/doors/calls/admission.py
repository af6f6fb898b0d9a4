"""`Admission`: how many calls, streams and bytes a door holds at once, and whose they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from moeserve.runtime.errors import LaneFull, pushback

RECENT_SECONDS = 2.0  # for so long a caller that was refused counts among those who want to be served


@dataclass(frozen=True)
class DoorLimits:
    """What one door, of a lane or the front, holds at most."""

    calls: int = 256
    streams: int = 256
    nbytes: int = 2 << 30  # of the messages of calls under way; a single one may have more
    request_seconds: float = 30.0  # within which a call's message has to arrive
    unread_seconds: float = 30.0  # within which the caller of a stream has to take a reply


@dataclass
class _Caller:
    """What a door knows of one connection."""

    calls: int = 0
    refusals: int = 0  # since its last call was let in
    refused: float = 0.0  # when


class Admission:
    """Lets calls in. Safe from any thread.

    Once half of the room is taken, no connection may hold more than its share of it, which is the room
    divided by the connections that hold or want some: one that asks without a pause takes no other's. Whoever
    is refused is told when to come back: later after each refusal in a row, and never at the same time as
    others.
    """

    def __init__(self, limits: DoorLimits) -> None:
        self.limits = limits
        self._callers: dict[str, _Caller] = {}
        self._calls = 0
        self._streams = 0
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def held(self) -> tuple[int, int, int]:
        """Calls, streams and bytes that are held now."""
        return self._calls, self._streams, self._nbytes

    def enter(self, peer: str, nbytes: int) -> Callable[[], None]:
        """Lets in a call of `nbytes` from the connection `peer`; returns what ends it, to be called once.

        Raises LaneFull with the time to come back after.
        """
        now = time.monotonic()
        with self._lock:
            caller = self._callers.setdefault(peer, _Caller())
            why = self._why_not(caller, nbytes, now)
            if why:
                caller.refusals += 1
                caller.refused = now
                raise LaneFull(why, pushback(caller.refusals))
            caller.calls += 1
            caller.refusals = 0
            self._calls += 1
            self._nbytes += nbytes

        def leave() -> None:
            with self._lock:
                caller.calls -= 1
                self._calls -= 1
                self._nbytes -= nbytes
                self._forget_idle()

        return leave

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

    def open_stream(self) -> Callable[[], None]:
        """Lets in a stream; returns what ends it, to be called once. Raises LaneFull where too many are."""
        with self._lock:
            if self._streams >= self.limits.streams:
                text = f"{self._streams} streams are open, as many as server.max_streams allows"
                raise LaneFull(text, pushback(1))
            self._streams += 1

        def close() -> None:
            with self._lock:
                self._streams -= 1

        return close

    def _fits(self, nbytes: int) -> bool:
        return not self._nbytes or self._nbytes + nbytes <= self.limits.nbytes

    def _why_not(self, caller: _Caller, nbytes: int, now: float) -> str:
        """Why no call of `nbytes` from `caller` is let in now; empty where one is."""
        limits = self.limits
        if self._calls >= limits.calls:
            return f"{self._calls} calls are under way, as many as server.max_concurrent_calls allows"
        if not self._fits(nbytes):
            return (
                f"{nbytes} bytes do not fit: calls of {self._nbytes} bytes are under way, and "
                f"server.max_held_bytes is {limits.nbytes}"
            )
        if 2 * self._calls >= limits.calls:
            wanting = sum(
                1
                for other in self._callers.values()
                if other is caller or other.calls or now - other.refused < RECENT_SECONDS
            )
            share = max(1, limits.calls // wanting)
            if caller.calls >= share:
                return (
                    f"this connection has {caller.calls} calls under way, and its share of "
                    f"{limits.calls} among {wanting} connections is {share}"
                )
        return ""

    def _forget_idle(self) -> None:
        """Forgets connections without a call, once there are more of them than calls may be."""
        if len(self._callers) > 2 * self.limits.calls:
            now = time.monotonic()
            self._callers = {
                peer: caller
                for peer, caller in self._callers.items()
                if caller.calls or now - caller.refused < RECENT_SECONDS
            }
