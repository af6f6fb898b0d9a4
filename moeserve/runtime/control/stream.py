"""The coordinator's persistent streams: small framed messages over TCP, in order, without delay.

`frames` says what a frame is. Tensors never travel here. A plain socket and not gRPC, because a step costs
two of these hops and gRPC's take many times longer. Two processes of a host may move what they send from the
socket to rings in shared memory (`ring`), each when it likes; the socket then tells that the other one lives.
"""

from __future__ import annotations

import fcntl
import io
import logging
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection

from moeserve.proto.texts import clipped
from moeserve.runtime.control.frames import LENGTH, decoded, encoded
from moeserve.runtime.control.frames import Message as Message
from moeserve.runtime.control.ring import RingEnd
from moeserve.runtime.keys.keys import NO_KEYS, Connection, Keys

log = logging.getLogger(__name__)

_LIMIT = 1 << 26  # a placement of 58 layers x 1024 slots is 0.5 MB
_MOVED = encoded({"kind": "moved"})  # the last frame that comes over the socket
MOST_KEEPALIVE = 32767  # seconds that Linux takes for TCP_KEEPIDLE and TCP_KEEPINTVL
HELLO_BYTES = 1 << 18  # of the first message, whose sender has yet to show the token; 58 layers take 10 KB


class StreamClosed(ConnectionError):
    """The other end is gone, or sent something that is not a frame."""


class StreamSilent(StreamClosed):
    """The other end gave or took nothing within the bound of this one."""


class Stream:
    """One connected socket. `send` is safe from several threads; one thread receives."""

    def __init__(self, connection: Connection) -> None:
        if not isinstance(connection, socket.socket) or connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.settimeout(None)
        self._socket = connection
        self._reader: io.BufferedReader = connection.makefile("rb", buffering=1 << 16)  # type: ignore[assignment]
        self._lock = threading.Lock()
        self._sends_within = 0.0  # seconds; 0: without a bound
        self._ring: RingEnd | None = None  # which either end may move to
        self._moved = self._followed = False  # whether this end sends over the ring, and the other one
        self._left: Message | str | None = None  # what `take` left for `receive`; str: why the stream ends
        self.take_ring: Callable[[Message, Stream], None] | None = None  # takes an offer of the other end
        self.on_close: Callable[[], None] = _nothing

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    @property
    def moved(self) -> bool:
        """Whether what is sent goes over a ring."""
        return self._moved

    def attach(self, ring: RingEnd) -> None:
        """Has a ring to the same process: frames come over it once the other end has moved."""
        self._ring = ring

    def move(self) -> None:
        """Sends over the attached ring from now on. Raises StreamClosed."""
        try:
            with self._lock:
                if not self._moved:
                    self._socket.sendall(_MOVED)
                    self._moved = True
        except OSError as error:
            raise self._ended(error) from error

    def bound_sends(self, seconds: float) -> None:
        """Sends to an end that takes no byte for so long raise StreamSilent; the stream is of no use then.

        Receiving is not bounded by it.
        """
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._sends_within = seconds

    def bound_silence(self, seconds: float) -> None:
        """Ends the stream where the other end's host has not answered for so long, as one without power does.

        A host answers for a process that is stopped, and for one that says nothing.
        """
        every = min(max(1, int(seconds / 4)), MOST_KEEPALIVE)
        for option, value in (
            (socket.TCP_KEEPIDLE, every),
            (socket.TCP_KEEPINTVL, every),
            (socket.TCP_USER_TIMEOUT, int(seconds * 1000)),
        ):
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)

    def bound_receives(self, seconds: float) -> None:
        """To receive from an other end that gives no byte for so long raises StreamSilent, and so does a send
        that takes longer; the stream is of no use then. What comes over a ring is not bounded by it.
        """
        self._socket.settimeout(seconds)

    def send(self, message: Message) -> None:
        """Sends one message. Raises StreamClosed when the other end is gone, StreamSilent past a bound."""
        self.send_bytes(encoded(message))

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Sends a frame that was encoded for several ends, or raw bytes behind a message that announced them.

        Raises as `send` does.
        """
        try:
            with self._lock:
                if self._moved and self._ring is not None:
                    self._ring.write(data, self._sends_within)
                else:
                    self._socket.sendall(data)
        except OSError as error:
            raise self._ended(error) from error

    def _ended(self, error: OSError) -> StreamClosed:
        """What a failure of the socket means."""
        if isinstance(error, BlockingIOError):
            return StreamSilent(f"it takes nothing of what is sent to it for {self._sends_within:g} s")
        if isinstance(error, TimeoutError):
            return StreamSilent(f"timed out: nothing came or was taken for {self._socket.gettimeout()} s")
        return StreamClosed(clipped(str(error)))

    def receive(self) -> Message:
        """The next message; blocks without a bound. Raises StreamClosed at the end."""
        while True:
            message = self._next()
            if message["kind"] == "moved":
                self._follow()
            elif message["kind"] == "ring" and self.take_ring is not None:
                self.take_ring(message, self)
            else:
                return message

    @property
    def followed(self) -> bool:
        """Whether what is received comes over a ring."""
        return self._followed

    def take(self, kinds: Collection[str], seconds: float) -> Message | None:
        """The next message over the ring, where it comes within `seconds` and is of one of `kinds`.

        None where nothing came or it was woken, and where it is for `receive`: another message, or the
        stream's end. `waits` tells these apart.
        """
        ring = self._ring if self._followed else None
        if ring is None or self._left is not None or not ring.await_bytes(seconds):
            return None
        try:
            message = self._next()
        except StreamClosed as closed:
            self._left = str(closed)
            return None
        if message["kind"] in kinds:
            return message
        self._left = message
        return None

    def wake(self) -> None:
        """Has the `take` under way return, or the next one; from any thread."""
        if self._ring is not None:
            self._ring.wake()

    @property
    def ready(self) -> bool:
        """Whether the next message over the ring is there, or begins to come."""
        return self._left is not None or (self._ring is not None and self._followed and self._ring.ready)

    @property
    def waits(self) -> bool:
        """Whether `receive` has something to tell that `take` has left to it."""
        return self._left is not None or self._ring is None or not self._followed or self._ring.over

    def _next(self) -> Message:
        """The next message, also one that is for this stream itself."""
        if (left := self._left) is not None:
            self._left = None
            if isinstance(left, str):
                raise StreamClosed(left)
            return left
        if self._followed and self._ring is not None and (body := self._ring.frame()) is not None:
            try:
                return decoded(body)
            except ValueError as error:
                raise StreamClosed(str(error)) from error
        return self._message(self._read, _LIMIT)

    def _follow(self) -> None:
        """The other end has moved: frames come over the ring from now on, and go over it too.

        So the end that offers rings moves only when the other one has mapped them.
        """
        if self._ring is None or self._followed:
            raise StreamClosed("the other end moved to a ring that it was not offered")
        self._followed = True
        self.move()

    def receive_first(self, within: float) -> Message:
        """The first message of whoever connected: it has `within` seconds in all and HELLO_BYTES at most.

        Raises StreamClosed at the end, and when a bound has passed: the stream is of no use then.
        """
        deadline = time.monotonic() + within
        message = self._message(lambda size: self._read_until(size, deadline), HELLO_BYTES)
        self._socket.settimeout(None)
        return message

    def _message(self, read: Callable[[int], bytes], limit: int) -> Message:
        try:
            (length,) = LENGTH.unpack(read(LENGTH.size))
            if length > limit:
                raise StreamClosed(f"a frame of {length} bytes is over the limit of {limit}")
            return decoded(read(length))
        except StreamClosed:
            raise  # as its own cause it would keep the stream, and its socket, until a collection
        except OSError as error:
            raise self._ended(error) from error
        except ValueError as error:
            raise StreamClosed(str(error)) from error

    def receive_bytes(self, into: memoryview) -> None:
        """Fills `into` with the raw bytes that come next. Raises StreamClosed."""
        try:
            ring = self._ring if self._followed else None
            read = self._reader.readinto(into) if ring is None else ring.readinto(into)
        except OSError as error:
            raise self._ended(error) from error
        if read is None or read < len(into):
            raise StreamClosed("the other end closed the stream")

    def _read(self, size: int) -> bytes:
        ring = self._ring if self._followed else None
        data: bytes | None = self._reader.read(size) if ring is None else ring.read(size)
        if data is None or len(data) < size:
            raise StreamClosed("the other end closed the stream")
        return data

    def _read_until(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            more = self._reader.read1(size - len(data))
            if not more:
                raise StreamClosed("the other end closed the stream")
            data += more
            if time.monotonic() > deadline:
                raise StreamClosed("timed out: the first message took too long")
        return bytes(data)

    def close(self) -> None:
        """Closes both directions; a thread blocked in `receive` gets StreamClosed."""
        if self._ring is not None:
            self._ring.close()
        self.on_close()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end closed first
        finally:
            self._socket.close()


def _nothing() -> None:
    """Does nothing: nobody waits for the end of a stream."""


HIGH = 4096
"""Descriptors below which one is looked for that is closed first, where the process may have so many."""

HIGH_ROOM = 64
"""So many of the highest are for connections that are to be closed first."""


def closed_first(connection: socket.socket) -> socket.socket:
    """The same connection under one of the highest descriptors, of which the kernel closes a killed process's
    first. A GPU's take 50 to 300 ms to be closed, in which nobody would know that the process is dead.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = (HIGH if most == resource.RLIM_INFINITY else min(most, HIGH)) - HIGH_ROOM
    try:
        found = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, least)
    except OSError as error:
        log.info("a connection keeps descriptor %d: %s", connection.fileno(), error)
        return connection
    moved = socket.socket(fileno=found)
    moved.settimeout(connection.gettimeout())
    connection.close()
    return moved


def connect(address: str, timeout: float, keys: Keys = NO_KEYS) -> Stream:
    """A stream to `host:port`. Raises StreamClosed when nobody who fits `keys` answers within `timeout`
    seconds.
    """
    host, port = address.rsplit(":", 1)
    try:
        return Stream(keys.dial(closed_first(socket.create_connection((host, int(port)), timeout)), host))
    except OSError as error:
        raise StreamClosed(f"cannot reach {address}: {error}") from error
