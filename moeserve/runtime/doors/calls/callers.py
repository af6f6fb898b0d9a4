"""`Callers`: who calls at a door, what each holds of it, and how much of it is each one's share."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from moeserve.runtime.errors import LONGEST_PUSHBACK, pushback

OVERASKED = 2.0  # times as many callers are told to come back as there will be room for
SMOOTH = 0.1  # of the newest time between two calls, in their mean
RECENT_SECONDS = 2 * LONGEST_PUSHBACK  # for so long who was refused counts among those who want more


@dataclass(eq=False)
class Caller:
    """What a door knows of one caller: a connection, or a process that shares memory with the lane."""

    peer: str  # as gRPC names it, `ipv4:10.0.0.7:50123`, or `unix:` and a process id
    host: str
    calls: int = 0
    held: int = 0  # of what the door counts: calls, or rows
    refusals: int = 0  # since its last call was let in, those counted once that came at the same time
    refused: float = -math.inf  # when
    until: float = -math.inf  # when the first of those that were refused together was told to come back
    turn: float = 0.0  # when the last of them was
    room: float = math.inf  # what its last call left others to hold

    def wants(self, now: float) -> bool:
        """Whether it is served, or wants to be."""
        return self.calls > 0 or now - self.refused < RECENT_SECONDS

    def refuse(self, now: float, every: float) -> float:
        """Notes a refusal; returns the seconds after which the caller is told to come back.

        They double each time that it comes back and is refused again. Calls that are refused together, before
        the first of them was to come back, are told to come one after the other, with `every` seconds between
        them: a caller with many calls is refused no more often than one with a few.
        """
        if now >= self.until:
            self.refusals += 1
            self.until = now + pushback(self.refusals)
        self.turn = min(max(self.turn, now) + every, now + LONGEST_PUSHBACK)
        self.refused = now
        return max(pushback(self.refusals), self.turn - now)


class Callers:
    """Those who hold something of a door, or were refused lately. Its owner holds a lock."""

    def __init__(self) -> None:
        self._by_peer: dict[str, Caller] = {}
        self._every = 0.0  # seconds between two calls that end
        self._ended = -math.inf

    def __len__(self) -> int:
        return len(self._by_peer)

    def of(self, peer: str) -> Caller:
        """The caller by that name, known from now on."""
        caller = self._by_peer.get(peer)
        if caller is None:
            caller = self._by_peer[peer] = Caller(peer, host_of(peer))
        return caller

    def wanting(self, caller: Caller, now: float) -> list[Caller]:
        """`caller`, and all others that are served or want to be."""
        return [other for other in self._by_peer.values() if other is caller or other.wants(now)]

    def enter(self, caller: Caller, held: int) -> None:
        """A call of `caller` is let in, which holds so much."""
        caller.calls, caller.held, caller.refusals = caller.calls + 1, caller.held + held, 0

    def leave(self, caller: Caller, held: int, now: float) -> None:
        """A call of `caller` has ended, which held so much."""
        caller.calls, caller.held = caller.calls - 1, caller.held - held
        if (gap := now - self._ended) < RECENT_SECONDS:
            self._every += SMOOTH * (gap - self._every)
        self._ended = now

    def refuse(self, caller: Caller, now: float) -> float:
        """A call of `caller` is refused; returns the seconds after which it is told to come back."""
        return caller.refuse(now, self._every / OVERASKED * len(self.wanting(caller, now)))

    def share(self, caller: Caller, wanting: list[Caller], limit: float) -> float:
        """What of `limit` is the caller's: hosts have even shares, and so have callers of one host.

        So a client that opens many connections takes from others of its own host alone.
        """
        by_host = Counter(other.host for other in wanting)
        return limit / len(by_host) / by_host[caller.host]

    def forget(self, most: int, now: float) -> None:
        """Forgets callers that hold nothing and want nothing, once more than `most` are known."""
        if len(self._by_peer) > most:
            self._by_peer = {peer: each for peer, each in self._by_peer.items() if each.wants(now)}


def host_of(peer: str) -> str:
    """The host of a peer as gRPC names it, without the port; a Unix socket's is this host."""
    kind, _, rest = peer.partition(":")
    return rest.rpartition(":")[0] if kind in ("ipv4", "ipv6") else "this host"
