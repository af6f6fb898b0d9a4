"""`Callers`: who calls at a door, what each holds of it, and how much of it is each one's share.

`Places`: the same of what may be held for long, such as streams. `FirstMessages`: who of them keeps a thread
waiting for the message of a call.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from moeserve.runtime.errors import LONGEST_PUSHBACK, LaneFull, pushback

PART = 0.875
"""Of what others leave of something that may be held for long, which a host may have, or a connection."""

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


class Places:
    """Who holds how many of what there is so much of, and may be held for long. Its owner holds a lock.

    Once half are taken callers of one host may have seven eighths of what those of other hosts leave, and one
    connection seven eighths of what others of its host leave of these; who has none may have one while there
    is any. So a few callers that let go of none leave some to others; of several that want more each has
    nearly an even share.
    """

    def __init__(self, holders: Iterable[str] = ()) -> None:
        """holders: the peer of each that is held."""
        self._by_peer = Counter(holders)
        self._by_host = Counter[str]()
        for peer, count in self._by_peer.items():
            self._by_host[host_of(peer)] += count

    def __len__(self) -> int:
        return self._by_peer.total()

    def why_not(self, peer: str, limit: int, what: str) -> str:
        """Why the caller at `peer` may have no more than it holds; empty where it may. what: these are."""
        own, of_host = self._by_peer[peer], self._by_host[host_of(peer)]
        if (count := len(self)) >= limit:
            return f"{count} {what}, as many as there may be"
        if not own or 2 * count < limit:
            return ""
        host_most = math.ceil(PART * (limit - (count - of_host)))
        most = max(0, math.ceil(PART * (host_most - (of_host - own))))
        if own < most:
            return ""
        others = f"{of_host - own} of this host and {count - of_host} of other hosts"
        return f"{own} {what} for this connection, which may have {most} of {limit} beside {others}"

    def take(self, peer: str) -> None:
        """The caller at `peer` holds one more."""
        self._by_peer[peer] += 1
        self._by_host[host_of(peer)] += 1

    def give(self, peer: str) -> None:
        """It holds one less."""
        for counts, key in ((self._by_peer, peer), (self._by_host, host_of(peer))):
            counts[key] -= 1
            if not counts[key]:
                del counts[key]


class FirstMessages:
    """Calls whose message has yet to come, each of which keeps a thread of a pool waiting. From any thread.

    What comes without its message is not to take all threads from those whose message is there.
    """

    def __init__(self, most: int, *, small: bool) -> None:
        """most: of such calls at a time. small: messages come with their calls, as those of questions do: one
        that is `late` while there are more is left. Others are large and take their time: of a caller that
        has its part no further call is taken.
        """
        self._most, self.small = most, small
        self._places = Places()
        self._waiting: dict[object, str] = {}  # of whom
        self._lock = threading.Lock()

    def begin(self, peer: str) -> object:
        """A thread waits for a message of the caller at `peer`; what `over` takes.

        Raises LaneFull where this caller has too many of them.
        """
        entry = object()
        with self._lock:
            if not self.small and (
                why := self._places.why_not(peer, self._most, "calls wait for their message")
            ):
                raise LaneFull(f"{why}: send it with the call", pushback(1))
            self._waiting[entry] = peer
            self._places.take(peer)
        return entry

    def late(self, entry: object) -> bool:
        """Whether to leave a caller whose small message is not there a while after its call: its thread is
        wanted. A burst of many calls takes some time to be read, and is not left for that.
        """
        with self._lock:
            return entry in self._waiting and len(self._waiting) > self._most

    def over(self, entry: object) -> None:
        """The message is there, or nobody waits for it any more."""
        with self._lock:
            self._places.give(self._waiting.pop(entry))
