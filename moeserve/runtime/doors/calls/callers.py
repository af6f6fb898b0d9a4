"""`Callers`: who calls at a door, what each holds of it, and how much of it is each one's share."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from moeserve.runtime.errors import pushback

RECENT_SECONDS = 2.0  # for so long a caller that was refused counts among those who want to be served


@dataclass(eq=False)
class Caller:
    """What a door knows of one caller: a connection, or a process that shares memory with the lane."""

    peer: str  # as gRPC names it, `ipv4:10.0.0.7:50123`, or `unix:` and a process id
    host: str
    calls: int = 0
    held: int = 0  # of what the door counts: calls, or rows
    refusals: int = 0  # since its last call was let in, those counted once that came at the same time
    refused: float = -math.inf  # when
    until: float = -math.inf  # when it was told to come back
    room: float = math.inf  # what its last call left others to hold

    def wants(self, now: float) -> bool:
        """Whether it is served, or wants to be."""
        return self.calls > 0 or now - self.refused < RECENT_SECONDS

    def refuse(self, now: float) -> float:
        """Notes a refusal; returns the seconds after which the caller is told to come back.

        They double each time that it comes back and is refused again. Calls that it had sent meanwhile are
        told as much and add nothing: a caller with many calls at once is not refused for longer than one with
        a single call.
        """
        if now >= self.until:
            self.refusals += 1
        wait = pushback(self.refusals)
        self.refused, self.until = now, max(self.until, now + wait)
        return wait


class Callers:
    """Those who hold something of a door, or were refused lately. Its owner holds a lock."""

    def __init__(self) -> None:
        self._by_peer: dict[str, Caller] = {}

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
