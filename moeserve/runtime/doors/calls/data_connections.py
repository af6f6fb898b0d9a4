"""`DataConnections`: a lane's calls over TCP connections, past gRPC; a thread reads each of them.

Who asks over gRPC, and is let in there, gets a secret for one connection.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing

import grpc

from moeserve.proto import moe_pb2
from moeserve.proto.texts import clipped
from moeserve.proto.transports.data_connections import LET_IN, SECRET_BYTES
from moeserve.proto.transports.frames import Connection, received
from moeserve.runtime.control.acceptor import Acceptor, Guest
from moeserve.runtime.doors.calls.admission import Admission
from moeserve.runtime.doors.calls.callers import Places
from moeserve.runtime.doors.calls.connection_lane import OwnLanes
from moeserve.runtime.doors.calls.data_connection import DataConnection, Terms
from moeserve.runtime.doors.calls.lane_stream import Begins
from moeserve.runtime.doors.deadlines import Observe, uncounted
from moeserve.runtime.doors.payloads.regions import Regions
from moeserve.runtime.keys.guard import Still, let_in
from moeserve.runtime.keys.keys import NO_KEYS, Keys

log = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0


Offer = Callable[[grpc.ServicerContext], moe_pb2.OpenDataConnectionReply]
"""Takes one connection more, of the caller of an RPC. Raises LaneFull."""

OPENING = "/moeserve.v1.LaneService/OpenDataConnection"


class DataConnections:
    """Listens at a port of its own of `host`. What callers hold counts in the door's `admission`; there are
    as many connections at most as streams may be, beside those, with the same part of them for one caller.
    """

    def __init__(
        self,
        host: str,
        door: Begins,
        regions: Regions,
        admission: Admission,
        most_bytes: int,
        lanes: OwnLanes | None = None,
        keys: Keys = NO_KEYS,
        observe: Observe = uncounted,
    ) -> None:
        """most_bytes: of one message with its data. lanes: None: calls go over none. keys: whether callers
        come over TLS, and what they are shown. observe: is told of calls that are refused before the door
        sees them.
        """
        # half of the regions at most; the rest is others'
        rooms = threading.BoundedSemaphore(max(1, regions.limits.max_regions // 2))
        self._terms = Terms(door, regions, admission, most_bytes, rooms, lanes, observe)
        self._keys = keys
        listener = socket.create_server((host, 0))
        self.port: int = listener.getsockname()[1]
        # of whom, until when, and what asks whether it is still let in
        self._secrets: dict[bytes, tuple[str, float, Still]] = {}
        self._there = set[DataConnection]()
        self._lock = threading.Lock()
        self._closed = False
        self._acceptor = Acceptor(listener, "data", self._serve)
        self._acceptor.start()

    def offered(self, context: grpc.ServicerContext) -> moe_pb2.OpenDataConnectionReply:
        """What the caller of an RPC needs to make one connection. Raises LaneFull."""
        return self.offer(context.peer(), self._keys.still(OPENING, context))

    def offer(self, peer: str, still: Still = let_in) -> moe_pb2.OpenDataConnectionReply:
        """What the caller at `peer` needs to make one connection. still: raises Refused at a call that comes
        when it is not let in any more. Raises LaneFull.
        """
        now, secret = time.monotonic(), secrets.token_bytes(SECRET_BYTES)
        with self._lock:
            for old in [old for old, (_, until, _) in self._secrets.items() if until < now]:
                del self._secrets[old]
            there = [one.peer for one in self._there] + [one[0] for one in self._secrets.values()]
            what = "data connections are there or to come"
            self._terms.admission.check_place(peer, Places(there), what)
            self._secrets[secret] = peer, now + self._hello_seconds, still
        return moe_pb2.OpenDataConnectionReply(port=self.port, secret=secret)

    @property
    def busy(self) -> bool:
        """Whether a call is under way, or has an answer that its caller has yet to take."""
        with self._lock:
            return any(one.busy for one in self._there)

    def close(self) -> None:
        """Ends all connections, and waits until their threads have ended."""
        self._acceptor.close()
        with self._lock:
            self._closed, there = True, list(self._there)
        for one in there:
            one.end()
        until = time.monotonic() + CLOSE_SECONDS
        while self._there and time.monotonic() < until:
            time.sleep(0.005)
        if self._there:
            log.error("%d data connections did not end within %g s", len(self._there), CLOSE_SECONDS)

    def _serve(self, guest: Guest) -> None:
        """Lets a caller in who has a secret, and takes its calls until it leaves."""
        try:
            with guest.connection, closing(self._keys.accept(guest.connection)) as connection:
                peer, still = self._let_in(connection)
                guest.known()
                self._take_calls(connection, peer, still)
        except (OSError, ValueError) as error:
            log.info("a data connection of %s ends: %s", guest.peer, clipped(str(error)))

    def _let_in(self, connection: Connection) -> tuple[str, Still]:
        """Whose connection it is, and what asks whether that is still let in. Raises OSError."""
        shown = received(connection, SECRET_BYTES, time.monotonic() + self._hello_seconds)
        with self._lock:  # a dict finds a secret by its hash, which does not tell how nearly one is right
            peer, until, still = self._secrets.pop(shown, ("", 0.0, let_in))
        if until < time.monotonic():
            raise ConnectionRefusedError("it showed no secret that was given for a connection")
        return peer, still

    @property
    def _hello_seconds(self) -> float:
        return self._terms.admission.limits.hello_seconds

    def _take_calls(self, connection: Connection, peer: str, still: Still) -> None:
        made = DataConnection(self._terms, connection, peer, still)
        with self._lock:
            if self._closed:
                return
            self._there.add(made)
        try:
            connection.settimeout(self._hello_seconds)
            connection.sendall(LET_IN)
            made.run()
        finally:
            made.close()
            with self._lock:
                self._there.discard(made)
