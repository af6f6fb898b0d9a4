"""`DataConnections`: a lane's calls over TCP connections, past gRPC; a thread reads each of them.

Who asks over gRPC, and is let in there, gets a secret for one connection. A connection has one call under
way: its thread reads the request and begins the call, and whoever ends that sends the answer, as far as the
connection takes it at once. The rest is sent by the connection's thread, so that a caller who does not read
holds nobody up.

Rows are received in a region of the rank's, which a device reads and writes, and the answer is sent from
there: to the door they are a call in shared memory.
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable

from google.protobuf.message import DecodeError

from moeserve.proto import moe_pb2
from moeserve.proto.texts import clipped
from moeserve.proto.transports.data_connections import (
    LET_IN,
    SECRET_BYTES,
    Buffers,
    FrameReader,
    frame_of,
    sent_of,
)
from moeserve.runtime.control.acceptor import Acceptor, Guest
from moeserve.runtime.doors.calls.admission import Admission
from moeserve.runtime.doors.calls.connection_region import ConnectionRegion
from moeserve.runtime.doors.calls.lane_stream import Begins, Started
from moeserve.runtime.doors.failures import status_of
from moeserve.runtime.doors.operations import BadRequest
from moeserve.runtime.doors.payloads.regions import Regions
from moeserve.runtime.doors.payloads.wake import Wake
from moeserve.runtime.errors import LaneFull, pushback

log = logging.getLogger(__name__)

HELLO_SECONDS = 5.0
"""For a caller to connect with the secret that it got, and to send it once it has connected."""

ASIDE_BYTES = 1 << 18
"""Answers from this size on are sent by the connection's thread: who ends calls has others to end."""

CLOSE_SECONDS = 2.0


Offer = Callable[[str], moe_pb2.OpenDataConnectionReply]
"""Takes one connection more, of the caller at a peer. Raises LaneFull."""


DATA_CONNECTION = "DataConnection"
"""How metrics of requests name these calls."""

REST_SECONDS = 10.0
"""Without a call, after which a connection gives its region back."""


class Late(OSError):
    """The other end did not do its part in time."""


class DataConnections:
    """Listens at a port of its own of `host`. What callers hold counts in the door's `admission`; there are
    as many connections at most as streams may be, beside those.
    """

    def __init__(
        self, host: str, door: Begins, regions: Regions, admission: Admission, most_bytes: int
    ) -> None:
        """most_bytes: of one message with its data."""
        self.door, self.regions, self.admission, self.most_bytes = door, regions, admission, most_bytes
        listener = socket.create_server((host, 0))
        self.port: int = listener.getsockname()[1]
        self._secrets: dict[bytes, tuple[str, float]] = {}  # of whom, and until when
        self._there = set[_DataConnection]()
        # of regions; the rest is others'
        self.rooms = threading.BoundedSemaphore(max(1, regions.limits.max_regions // 2))
        self._lock = threading.Lock()
        self._closed = False
        self._acceptor = Acceptor(listener, "data", self._serve)
        self._acceptor.start()

    def offer(self, peer: str) -> moe_pb2.OpenDataConnectionReply:
        """What the caller at `peer` needs to make one connection. Raises LaneFull."""
        now, secret = time.monotonic(), secrets.token_bytes(SECRET_BYTES)
        with self._lock:
            for old in [old for old, (_, until) in self._secrets.items() if until < now]:
                del self._secrets[old]
            there, most = len(self._there) + len(self._secrets), self.admission.limits.streams
            if there >= most:
                text = f"{there} data connections are there or to come; as many as server.max_streams allows"
                raise LaneFull(text, pushback(1))
            self._secrets[secret] = peer, now + HELLO_SECONDS
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
        connection = guest.connection
        try:
            with connection:
                peer = self._let_in(connection)
                guest.known()
                self._take_calls(connection, peer)
        except (OSError, ValueError) as error:
            log.info("a data connection of %s ends: %s", guest.peer, clipped(str(error)))

    def _let_in(self, connection: socket.socket) -> str:
        """Whose connection it is. Raises OSError."""
        until, shown = time.monotonic() + HELLO_SECONDS, b""
        while len(shown) < SECRET_BYTES:
            connection.settimeout(max(1e-3, until - time.monotonic()))
            more = connection.recv(SECRET_BYTES - len(shown))
            if not more:
                raise ConnectionRefusedError("it showed no secret")
            shown += more
        with self._lock:  # a dict finds a secret by its hash, which does not tell how nearly one is right
            peer, until = self._secrets.pop(shown, ("", 0.0))
        if until < time.monotonic():
            raise ConnectionRefusedError("it showed no secret that was given for a connection")
        return peer

    def _take_calls(self, connection: socket.socket, peer: str) -> None:
        made = _DataConnection(self, connection, peer)
        with self._lock:
            if self._closed:
                return
            self._there.add(made)
        try:
            connection.sendall(LET_IN)
            made.run()
        finally:
            made.close()
            with self._lock:
                self._there.discard(made)


class _DataConnection:
    """One caller's connection, by the thread that runs it."""

    def __init__(self, of: DataConnections, connection: socket.socket, peer: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._of, self._connection, self._peer = of, connection, peer
        self._reader, self._wake = FrameReader(connection), Wake()
        self._limits = of.admission.limits
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)
        self._call: Started | None = None  # that is under way
        self._answering = False  # an answer is not sent whole
        self._left: Buffers = []  # of an answer that is to be sent by this connection's thread
        self._ending = False
        self._region = ConnectionRegion(of.regions, of.rooms)
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether a call is under way, or its answer is not sent whole."""
        return self._call is not None or self._answering

    def run(self) -> None:
        """Takes calls until the caller leaves. Raises OSError and ValueError where it does not keep to the
        form, or does its part too late.
        """
        self._connection.settimeout(0)
        sockets = self._connection.fileno()
        while True:
            ready = {
                which for which, _ in self._poll.poll(REST_SECONDS * 1000 if self._region.held else None)
            }
            if self._ending:
                return
            if not ready and not self.busy:
                self._region.close()
            if self._wake.fileno() in ready:
                self._wake.clear()
                self._send_left()
            if sockets in ready:
                with self._lock:
                    if self._call is not None:  # the answer is not on its way: nothing may come
                        raise ConnectionAbortedError("its caller left, or sent more, before the answer")
                if not self._take():
                    return

    def _take(self) -> bool:
        """Reads a request and begins its call; False where the caller has left."""
        until = time.monotonic() + self._limits.request_seconds

        def wait() -> None:
            self._wait(self._readable, until, "its message did not come within server.request_seconds")

        header = self._reader.header(wait)
        if header is None:
            return False
        nbytes = header[1] + header[2]
        if nbytes > self._of.most_bytes:
            most = self._of.most_bytes
            raise ValueError(f"a frame of {nbytes} bytes, and server.max_message_bytes is {most}")
        try:
            leave = self._of.admission.enter(self._peer, 2 * nbytes)  # its answer is about as large
        except LaneFull as full:
            self._reader.skip(header, wait)
            self._refuse("", full)
            return True
        try:
            message, data = self._reader.body(header, wait, self._region.rows)
        except BaseException:
            leave()
            raise
        request, wrong = moe_pb2.ForwardRequest(), ""
        try:
            request.MergeFromString(message)
        except DecodeError:
            wrong = f"{len(message)} bytes over a data connection are no ForwardRequest"
        if request.hidden.WhichOneof("payload") == "region" or request.HasField("output"):
            wrong = wrong or "hidden: a call over a data connection brings its rows, and takes its answer"
        if data is not None and request.hidden.WhichOneof("payload") is not None:
            wrong = wrong or "hidden: data behind a message that has them already"
        if wrong:
            leave()
            self._refuse(request.job_id, BadRequest(wrong))
        else:
            if data is not None:
                self._region.place(request, data)
            self._begin(request, leave)
        return True

    def _begin(self, request: moe_pb2.ForwardRequest, leave: Callable[[], None]) -> None:
        door, over = self._of.door, list[bool]()  # not empty once the call has ended
        started = Started(door.leave)

        def ended(reply: moe_pb2.ForwardStreamReply) -> None:
            over.append(True)
            leave()
            self._answer(reply)

        with self._lock:
            self._answering = True
        try:
            started.take(door.begin(request, ended, self._peer, DATA_CONNECTION))
        except BaseException:
            if not over:
                leave()
            raise
        with self._lock:
            if not over:
                self._call = started

    def _refuse(self, job_id: str, error: Exception) -> None:
        failed = status_of(error).as_message()
        self._answer(moe_pb2.ForwardStreamReply(job_id=job_id, error=failed))

    def _answer(self, reply: moe_pb2.ForwardStreamReply) -> None:
        """Sends a reply, or leaves that to the connection's thread; from any thread."""
        with self._lock:
            self._call = None  # before the caller has the reply, and sends its next request
            if self._ending:
                return
            data = self._region.answer(reply.reply)
            left = frame_of(reply.SerializeToString(), data)
            if sum(part.nbytes for part in left) < ASIDE_BYTES:
                try:
                    left = sent_of(self._connection, left)
                except OSError as failed:  # its thread sees the same
                    log.debug("a reply could not be sent: %s", failed)
                    left = []
            self._left, self._answering = left, bool(left)
        if left:
            self._wake.ring()

    def _send_left(self) -> None:
        with self._lock:
            left, self._left = self._left, []
        until = time.monotonic() + self._limits.unread_seconds
        while left:
            left = sent_of(self._connection, left)
            if self._ending:
                return
            if left:
                self._wait(self._writable, until, "its caller took no reply within server.unread_seconds")
        self._answering = False

    def _wait(self, ready: select.poll, until: float, why: str) -> None:
        left = until - time.monotonic()
        if left <= 0 or not ready.poll(left * 1000):
            raise Late(why)
        if self._ending:
            raise Late("the lane is stopping")

    def end(self) -> None:
        """Ends it, from any thread."""
        self._ending = True
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("a data connection was closed already: %s", error)
        self._wake.ring()

    def close(self) -> None:
        """The call under way is given up; by the connection's thread, as its last."""
        with self._lock:
            self._ending, call = True, self._call
            self._call, self._left, self._answering = None, [], False
        if call is not None:
            call.give_up()
        self._region.close()
        self._wake.close()
