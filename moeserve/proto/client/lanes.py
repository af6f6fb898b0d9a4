"""The lanes that a caller knows, which of them takes the next rows, and the open way to each.

A call goes to a lane of which its client has the fewest calls under way, of several such to its home. So
callers at the same time spread, and one that calls alone stays: its lane has its next step launched before
the rows are there, which it cannot while steps of another lane come between. A lane that has failed is
avoided for a while: it refuses at once, and so has the fewest calls under way. Calls whose rows lie in a
lane's memory do not count.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from moeserve.proto import moe_pb2
from moeserve.proto.channel import MAX_MESSAGE_BYTES
from moeserve.proto.errors import MoeError, NotFound, Unavailable

L = TypeVar("L")

log = logging.getLogger(__name__)

ANEW_SECONDS, ASK_SECONDS = 10.0, 5.0
"""After lanes were found, until they are asked for anew beside a call; and for that question. A lane that is
lost is seen by a call, and one that comes, or comes back, by nobody else.
"""


WHOLE = 1 << 32
"""Of which GetTopologyReply.begin_at is a part."""

AVOIDED_SECONDS = 1.0
"""For which a lane is avoided that gave no answer by a failure of its own."""

OWN_FAILURES = frozenset(("UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL"))
"""Codes of those; others are what the caller asked for, or how long it waits."""


class Lanes(Generic[L]):
    """What GetTopology said last, until a call finds it is no longer so, or it says otherwise. Safe from any
    thread.

    `connect(address, max_message_bytes)` makes the way to a lane; it is made when the lane is first used.
    """

    def __init__(self, connect: Callable[[str, int], L], first: int | None = None) -> None:
        """first: the number of the lane that is the client's home; None: the one that the front door names
        with the lanes, and with other lanes again: so clients spread, also over one that is back.
        """
        self.current: moe_pb2.GetTopologyReply | None = None
        self._connect = connect
        self._links: dict[str, L] = {}
        self._addresses: frozenset[str] = frozenset()  # of the lanes that were found last
        self._anew = math.inf  # when they are to be asked for
        self._unsure = False  # they are to be asked for by the next call, which waits for that
        self._first = first
        self._home = first or 0  # the number of the lane at which a caller alone is
        self._under_way: dict[str, int] = {}  # calls by the address of the lane at which they began
        self._avoided: dict[str, float] = {}  # until when, by address
        self._lock = threading.Lock()

    @contextmanager
    def begun(self, topology: moe_pb2.GetTopologyReply, bound: int | None = None) -> Iterator[int]:
        """A call: the number of the lane of `topology` at which it begins. bound: the rank whose lane takes
        it, where there is one.
        """
        start, address = self._begin(topology, bound)
        try:
            yield start
        finally:
            with self._lock:
                if left := self._under_way.pop(address) - 1:
                    self._under_way[address] = left

    def _begin(self, topology: moe_pb2.GetTopologyReply, bound: int | None) -> tuple[int, str]:
        lanes = topology.lanes
        with self._lock:
            if bound is None:
                start = self._least_busy(lanes)
            else:
                start = next((at for at, lane in enumerate(lanes) if lane.rank == bound), 0)
            address = lanes[start].address if lanes else ""
            self._under_way[address] = self._under_way.get(address, 0) + 1
        return start, address

    def _least_busy(self, lanes: Sequence[moe_pb2.Lane]) -> int:
        """The lock is held."""
        best, least = 0, (True, math.inf)
        for more in range(len(lanes)):
            at = (self._home + more) % len(lanes)
            address = lanes[at].address
            load = self._is_avoided(address), self._under_way.get(address, 0)
            if load == (False, 0):
                return at
            if load < least:
                best, least = at, load
        return best

    def _is_avoided(self, address: str) -> bool:
        until = self._avoided.get(address)
        if until is None:
            return False
        if time.monotonic() < until:
            return True
        del self._avoided[address]
        return False

    def failed(self, address: str, error: MoeError) -> None:
        """A lane gave no answer: where that was its own failure, calls go to others for a while."""
        if error.code in OWN_FAILURES:
            with self._lock:
                self._avoided[address] = time.monotonic() + AVOIDED_SECONDS

    def due(self) -> bool:
        """Whether they are to be asked for anew, by who makes a call now; said to one of all."""
        if time.monotonic() < self._anew:
            return False
        with self._lock:
            now = time.monotonic()
            said, self._anew = now >= self._anew, now + ANEW_SECONDS
        return said

    def found(self, topology: moe_pb2.GetTopologyReply) -> list[L]:
        """Takes note of `topology`, which serves; returns the ways to lanes that are gone, to be closed. What
        was said before stays the same object.
        """
        begin_at = topology.begin_at if topology.HasField("begin_at") else None
        topology.ClearField("begin_at")  # it is said once, to this caller
        with self._lock:
            self._anew = time.monotonic() + ANEW_SECONDS
            if topology == self.current:
                return []
            self.current = topology
            before, self._addresses = self._addresses, frozenset(lane.address for lane in topology.lanes)
            if before != self._addresses and self._first is None:
                part = random.randrange(WHOLE) if begin_at is None else begin_at  # of an older front door
                self._home = len(topology.lanes) * part // WHOLE
            self._avoided = {one: at for one, at in self._avoided.items() if one in self._addresses}
            gone = [address for address in self._links if address not in self._addresses]
            return [self._links.pop(address) for address in gone]

    def doubt(self, topology: moe_pb2.GetTopologyReply | None) -> None:
        """Forgets `topology`, on which a call failed, so that the next one asks anew. Keeps a newer one."""
        with self._lock:
            if self.current is topology:
                self.current = None

    def be_unsure(self) -> None:
        """Has the next call ask anew, and wait for that, since there may be other lanes by now. What was
        found serves until then, and on where the front door does not answer.
        """
        self._unsure = True

    def known(self) -> moe_pb2.GetTopologyReply | None:
        """What was said last; None where it is to be asked for, which is said to one of all while that serves
        others.
        """
        if not self._unsure:
            return self.current
        with self._lock:
            unsure, self._unsure = self._unsure, False
            return None if unsure else self.current

    def goes_on(self, failed: MoeError) -> moe_pb2.GetTopologyReply:
        """What was found before, which serves on where the front door has not said it anew. Raises `failed`
        where nothing was.
        """
        if (current := self.current) is None:
            raise failed
        log.debug("lanes that were found before serve on: %s", failed)
        return current

    @contextmanager
    def relied_on(self, topology: moe_pb2.GetTopologyReply) -> Iterator[None]:
        """What fails inside since there is no such lane, or nobody answers there, has the next one ask anew:
        another process may have the lane.
        """
        try:
            yield
        except Unavailable:
            self.doubt(topology)
            raise
        except NotFound:
            self.be_unsure()
            raise

    def pick(self, topology: moe_pb2.GetTopologyReply, bound: int | None, start: int) -> moe_pb2.Lane:
        """The lane `bound`, or the one at `start`, counted round and round. NotFound where there is no lane
        `bound`, and Unavailable where its rank is away, or there is none at all.
        """
        if bound is None:
            if not topology.lanes:  # all that there are leave
                raise Unavailable("UNAVAILABLE", "not_serving", "no lane takes calls now")
            return topology.lanes[start % len(topology.lanes)]
        for lane in topology.lanes:
            if lane.rank == bound:
                return lane
        text = f"lane {bound} is not one of the lanes {[lane.rank for lane in topology.lanes]}"
        if bound in topology.away:
            raise Unavailable("UNAVAILABLE", "no_lane", f"{text} now")
        raise NotFound("NOT_FOUND", "no_lane", text)

    def link(self, topology: moe_pb2.GetTopologyReply, lane: moe_pb2.Lane) -> L:
        """The way to `lane` of `topology`.

        Raises Unavailable where another call has learned meanwhile that nobody answers at its address.
        """
        address = lane.address
        with self._lock:
            link = self._links.get(address)
            if link is None:
                if address not in self._addresses:
                    raise Unavailable("UNAVAILABLE", "", f"the lane at {address} left the group")
                link = self._links[address] = self._connect(address, message_limit(topology))
            return link

    def clear(self) -> list[L]:
        """Forgets everything; returns the ways, to be closed."""
        with self._lock:
            links, self._links, self.current = list(self._links.values()), {}, None
            self._addresses, self._anew = frozenset(), math.inf
        return links


def message_limit(topology: moe_pb2.GetTopologyReply) -> int:
    """Bytes of the largest message that the lanes take."""
    return topology.max_message_bytes or MAX_MESSAGE_BYTES


def asking_for(seconds: float, before: moe_pb2.GetTopologyReply | None) -> float:
    """How long the front door is asked for the lanes, of so many seconds. before: what serves where it gives
    no answer.
    """
    return seconds if before is None else min(seconds, ASK_SECONDS)


def check_serving(topology: moe_pb2.GetTopologyReply) -> moe_pb2.GetTopologyReply:
    """`topology`, when it can be called; Unavailable with the service's reason otherwise."""
    if not topology.serving or not topology.lanes:
        reason = topology.reason or "the service has no lane"
        raise Unavailable("UNAVAILABLE", "not_serving", f"the group does not serve now: {reason}")
    return topology
