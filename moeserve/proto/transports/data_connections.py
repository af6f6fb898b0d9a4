"""`DataConnection`: calls to a lane over a TCP connection, past gRPC, with their tensors behind them.

A gRPC call takes some three threads on either side, and copies what it carries. Here the calling thread
writes the request and reads the answer itself, the lane's process has one thread that reads it, and rows are
received where they are used. A lane opens such a connection for whom it lets in over gRPC.

A connection has one call under way, in one of its `frames` to the lane, and one back.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from google.protobuf.message import DecodeError

from moeserve.proto import moe_pb2
from moeserve.proto.credentials import Credentials
from moeserve.proto.errors import MoeError, Unavailable, lane_late, outcome
from moeserve.proto.texts import quoted
from moeserve.proto.timeouts import bounded, milliseconds
from moeserve.proto.transports.awake import Awake
from moeserve.proto.transports.carried import Carried
from moeserve.proto.transports.fine_poll import FinePoll
from moeserve.proto.transports.frames import Connection, FrameReader, frame_of, received, sent_of
from moeserve.proto.transports.kept import Kept, seconds_to_open
from moeserve.proto.transports.tls import TlsSocket

SECRET_BYTES = 32
LET_IN = b"+"

Request = moe_pb2.ForwardRequest | Carried[moe_pb2.ForwardRequest]
Reply = moe_pb2.ForwardReply | Carried[moe_pb2.ForwardReply]
"""Of one call, with the data beside it where that is large."""

BESIDE_BYTES = 1 << 12
"""Data of this size on is sent beside its message: protobuf would copy it four times on its way."""

ANSWER_BYTES = 1 << 16
"""That a reply may have more than its request, whose rows are as many bytes as the answer's."""

ALONE_CALLS = 8
"""In a row over one connection, after which its caller is taken for the only one of its client."""


def request_frame(request: Request, timeout: float) -> list[memoryview]:
    """What is sent of a call that has so many seconds."""
    message, data = (request.message, request.data) if isinstance(request, Carried) else (request, None)
    message.timeout_ms = milliseconds(timeout)
    return frame_of(message.SerializeToString(), data)


def most_of(frame: Sequence[memoryview]) -> int:
    """How many bytes the reply to what is sent so may have: a lane's word for more is not taken."""
    return sum(part.nbytes for part in frame) + ANSWER_BYTES


def job_id_of(request: Request) -> str:
    """By which its reply is known."""
    message = request.message if isinstance(request, Carried) else request
    return message.job_id


def check_call(came: moe_pb2.ForwardStreamReply, job_id: str) -> None:
    """Raises ConnectionError for a reply to another call; one that was refused unread is known by none."""
    if came.job_id not in ("", job_id):
        raise ConnectionError(f"a reply to call {quoted(came.job_id)}, and {quoted(job_id)} was asked")


def reply_of(came: moe_pb2.ForwardStreamReply, data: memoryview | None) -> Reply:
    """The reply in what came, with the data behind it. Raises MoeError where it says one."""
    reply = outcome(came)
    if data is None:
        return reply
    reply.hidden.data = b""  # so it is told from a message without any
    return Carried(reply, data)


class DataConnection:
    """One connection to a lane, for one thread at a time: after a `send` comes one `receive`, or `close`."""

    def __init__(self, connection: Connection) -> None:
        """connection: to whom the lane has let in; it does not block from here on."""
        connection.settimeout(0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connection, self._reader = connection, FrameReader(connection)
        self._readable = FinePoll((connection,))
        self._writable = FinePoll((connection,), select.POLLOUT)
        self._seconds, self._deadline, self._job_id, self._most = 0.0, 0.0, "", 0
        self._awake = Awake()
        self.alone = False  # no other connection to the lane was used lately by its client
        self._process = os.getpid()

    @classmethod
    def open(
        cls,
        host: str,
        made: moe_pb2.OpenDataConnectionReply,
        timeout: float,
        credentials: Credentials | None = None,
    ) -> DataConnection:
        """A connection to the lane at `host` that answered so, over TLS where `credentials` say whom to
        trust. Raises OSError, and ValueError for keys that are none.
        """
        until = time.monotonic() + timeout
        bare = socket.create_connection((host, made.port), timeout)
        connection: Connection = bare
        try:
            if credentials is not None and credentials.ca:
                name = credentials.server_name or host
                connection = tls = TlsSocket(bare, credentials.context(), name)
                tls.handshake(until - time.monotonic())
            connection.settimeout(max(1e-3, until - time.monotonic()))
            connection.sendall(made.secret)
            if received(connection, len(LET_IN), until) != LET_IN:
                raise ConnectionRefusedError(f"{host}:{made.port} does not take this connection")
            return cls(connection)
        except BaseException:
            connection.close()
            raise

    @property
    def fresh(self) -> bool:
        """Whether the lane keeps it, as far as is seen here, and this process alone uses it."""
        if self._process != os.getpid():
            return False
        try:
            return not self._readable(0)  # nothing is asked: what there is to read is its end
        except OSError:
            return False

    def send(self, request: Request, timeout: float) -> None:
        """Sends a call that has so many seconds. Raises Unavailable, DeadlineExceeded; then `close` it."""
        self._seconds = bounded(timeout)
        self._deadline = time.monotonic() + self._seconds
        self._job_id = job_id_of(request)
        left: Sequence[memoryview] = request_frame(request, timeout)
        self._most = most_of(left)
        try:
            while left := sent_of(self._connection, list(left)):
                self._wait(self._writable)
        except MoeError:  # the deadline's, which is an OSError, too
            raise
        except OSError as failed:
            if _of_a_handler(failed):
                raise
            raise gone_error(str(failed)) from failed
        self._awake.begins()

    def receive(self, spin: float | None = 0.0) -> Reply:
        """The reply. Raises MoeError; where that is not said by the lane, the connection is closed.

        spin: seconds for which it looks again and again before it sleeps; None: about when the reply should
        come, while it is `alone`.
        """
        until = time.monotonic() + spin if spin else 0.0
        foresees = spin is None and self.alone

        def wait() -> None:
            nonlocal foresees
            if foresees:  # when the reply begins to come
                foresees = False
                self._wait(self._readable, self._awake)
                return
            while until and time.monotonic() < until:
                if self._readable(0):
                    return
            self._wait(self._readable)

        try:
            header = self._reader.header(wait, self._most)
            if header is None:
                raise ConnectionError("it closed the connection")
            message, data = self._reader.body(header, wait)
            came = moe_pb2.ForwardStreamReply.FromString(message)
            check_call(came, self._job_id)
        except MoeError:
            self.close()
            raise
        except (OSError, ValueError, MemoryError, DecodeError) as failed:  # what comes may be anything
            self.close()
            if _of_a_handler(failed):
                raise
            raise gone_error(str(failed)) from failed
        except BaseException:  # of a signal's handler: it is for who called
            self.close()
            raise
        return reply_of(came, data)

    def _wait(self, ready: FinePoll, awake: Awake | None = None) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0 or not (ready(left * 1000) if awake is None else awake.wait(ready, left * 1000)):
            raise lane_late(self._seconds)

    @property
    def closed(self) -> bool:
        """Whether it is of no use any more."""
        return self._connection.fileno() < 0

    def close(self) -> None:
        """Ends it; a call that is under way is given up by the lane."""
        self._connection.close()

    def end(self) -> None:
        """Ends a call that another thread waits for, with Unavailable; that thread closes it. After a fork
        the call is its parent's, and goes on.
        """
        if self._process == os.getpid():
            with suppress(OSError):  # it has ended
                self._connection.shutdown(socket.SHUT_RDWR)


class DataConnections:
    """The connections of a client to one lane. Safe to use from any thread."""

    def __init__(
        self,
        address: str,
        ask: Callable[[float], moe_pb2.OpenDataConnectionReply],
        credentials: Credentials | None = None,
    ) -> None:
        """ask: has the lane open one, within so many seconds; raises MoeError. credentials: whom to trust,
        where calls go over TLS.
        """
        self._host = host_of(address)
        self._ask = ask
        self._kept = Kept[DataConnection]()
        self._used = set[DataConnection]()
        self._credentials = credentials
        self._last: DataConnection | None = None  # that was taken
        self._row = 0  # times in a row that it was

    @property
    def likely(self) -> bool:
        """Whether `take` gives one, as far as is known."""
        return self._kept.likely

    def take(self, timeout: float) -> DataConnection | None:
        """One that nobody uses, or a new one; None where calls go by gRPC."""
        if (found := self._kept.idle()) is not None:
            self._row = self._row + 1 if found is self._last else 0
            self._last, found.alone = found, self._row >= ALONE_CALLS
            self._used.add(found)
        elif (found := self._opened(timeout)) is not None:
            self._used.add(found)
        else:
            return None
        if self._kept.closed:  # meanwhile
            found.end()
        return found

    def _opened(self, timeout: float) -> DataConnection | None:
        if not self._kept.may_open:
            return None
        seconds = seconds_to_open(timeout)
        try:
            return DataConnection.open(self._host, self._ask(seconds), seconds, self._credentials)
        except (MoeError, OSError, ValueError) as error:  # an older lane, one out of reach, new keys
            self._kept.refused(error, seconds)
            return None

    def give(self, connection: DataConnection) -> None:
        """Keeps one whose call was answered."""
        self._used.discard(connection)
        self._kept.give(connection)

    def drop(self, connection: DataConnection) -> None:
        """Closes one whose call nobody waits for."""
        self._used.discard(connection)
        connection.close()

    def close(self, *, ending: bool = True) -> None:
        """Closes idle ones, and those that come back later. ending: calls under way end as Unavailable."""
        self._kept.close()
        for connection in list(self._used) if ending else ():
            connection.end()


def host_of(address: str) -> str:
    """The host of a lane's address, at which its connections are."""
    return address.rpartition(":")[0].strip("[]")


def _of_a_handler(failed: Exception) -> bool:
    """Whether a signal's handler raised it: the system's own has a number, and waits here raise another."""
    return isinstance(failed, TimeoutError) and failed.errno is None


def gone_error(why: str) -> Unavailable:
    return Unavailable("UNAVAILABLE", "connection_lost", f"the lane's process is gone or stopping: {why}")
