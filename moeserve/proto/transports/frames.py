"""Frames: how a call and its answer are written to a data connection, and read from it.

A frame is a header, a message (ForwardRequest, and home ForwardStreamReply), and the data of its hidden
states where these are carried beside it.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable

import numpy as np

from moeserve.proto.transports.tls import TlsSocket

HEADER = struct.Struct("<4sIQ")
"""MAGIC, bytes of the message, and of the data behind it."""

MAGIC = b"moe1"

FIRST_BYTES = 1 << 16
"""That are asked for before it is known how long a frame is: most are shorter."""

ANY_SIZE = 1 << 62
"""Bytes of a frame: more than there are."""

MOST_AT_ONCE = 1 << 20
"""For which a reader of the rest of a frame sleeps on; the system wakes it sooner where it has no room for as
much.
"""

Buffers = list[memoryview]

Connection = socket.socket | TlsSocket
"""A TCP connection, encrypted where callers come over TLS."""


def frame_of(message: bytes, data: memoryview | None) -> Buffers:
    """What is sent of a message and its data."""
    size = 0 if data is None else data.nbytes
    head = memoryview(HEADER.pack(MAGIC, len(message), size) + message)
    return [head] if data is None else [head, data.cast("B")]


def sent_of(connection: Connection, left: Buffers) -> Buffers:
    """Sends as much as a connection that does not block takes now; returns what is left. Raises OSError."""
    if isinstance(connection, TlsSocket):
        return connection.send_some(left)
    try:
        sent = connection.sendmsg(left)
    except BlockingIOError:
        return left
    while left and sent >= left[0].nbytes:
        sent -= left[0].nbytes
        left = left[1:]
    return [left[0][sent:], *left[1:]] if sent and left else left


def received(connection: Connection, nbytes: int, until: float) -> bytes:
    """So many bytes, which have to come by a time of the monotonic clock, however seldom or often one does;
    fewer where the other end closes the connection before. It does not block from here on. Raises OSError.
    """
    connection.settimeout(0)
    readable, came, room = select.poll(), b"", memoryview(bytearray(nbytes))
    readable.register(connection, select.POLLIN)
    while len(came) < nbytes:
        try:
            more = connection.recv_into(room[len(came) :])
        except BlockingIOError:
            left = until - time.monotonic()
            if left <= 0 or not readable.poll(left * 1000):
                raise TimeoutError(f"{len(came)} of {nbytes} bytes came in time") from None
            continue
        if not more:
            break
        came = bytes(room[: len(came) + more])
    return came


def fresh_room(nbytes: int) -> memoryview:
    """New memory."""
    return np.empty(nbytes, np.uint8).data


def _any_room(message: bytes, nbytes: int) -> memoryview:
    return fresh_room(nbytes)


def _no_matter(nbytes: int) -> None:
    """Does nothing: nobody counts the bytes."""


def _sizes(came: memoryview, most: int) -> tuple[int, int]:
    """How many bytes of message and data a frame has that begins so. Raises ValueError where it is none, or
    has more than `most` bytes.
    """
    magic, message, data = HEADER.unpack_from(came)
    if magic != MAGIC:
        raise ValueError(f"{bytes(came[:4])!r} begins no frame; {MAGIC!r} does")
    if message + data > most:
        raise ValueError(f"a frame of {message + data} bytes, where {most} are awaited at most")
    if len(came) > HEADER.size + message + data:
        raise ValueError("bytes behind a frame, while its call is under way")
    return message, data


class FrameReader:
    """Reads one frame after the other of a connection that does not block. `wait` returns when there is more
    to read, or raises.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._wakes_late = isinstance(connection, socket.socket)  # of what is encrypted some may be here
        self._first = memoryview(bytearray(FIRST_BYTES))
        self._unread = 0  # bytes of the frame whose header came last

    def header(self, wait: Callable[[], object], most: int = ANY_SIZE) -> tuple[int, int, int] | None:
        """How many bytes of a frame came first, and how many its message and its data have; None where the
        other end has closed the connection before it. Raises OSError, and ValueError where it is no frame, or
        one of more than `most` bytes.
        """
        came = 0
        while came < HEADER.size:
            more = self._read(self._first[came:], wait)
            if not more:
                if came:
                    raise ConnectionError("it was closed within a frame")
                return None
            came += more
        size, behind = _sizes(self._first[:came], most)
        self._unread = HEADER.size + size + behind - came
        return came, size, behind

    def body(
        self,
        header: tuple[int, int, int],
        wait: Callable[[], object],
        room: Callable[[bytes, int], memoryview] = _any_room,
        took: Callable[[int], object] = _no_matter,
    ) -> tuple[bytes, memoryview | None]:
        """The message, and the data, in memory that `room` gives for so many bytes behind that message.

        took: is told how many bytes came behind those that came with the header, after a MiB or more each
        time. Where it raises, `skip` reads the rest of the frame. Raises OSError.
        """
        came, size, more = header
        there = self._first[HEADER.size : came]
        if len(there) >= size:
            message = bytes(there[:size])
            there = there[size:]
        else:
            whole = fresh_room(size)  # which takes no memory for what is only claimed
            whole[: len(there)] = there
            self._fill(whole[len(there) :], wait, took)
            message, there = bytes(whole), there[:0]
        if not more:
            return message, None
        data = room(message, more)
        data[: len(there)] = there
        self._fill(data[len(there) :], wait, took)
        return message, data

    def skip(self, wait: Callable[[], object]) -> None:
        """Reads what is unread of a frame, and keeps nothing. Raises OSError."""
        while self._unread:
            self._fill(self._first[: min(self._unread, FIRST_BYTES)], wait, _no_matter)

    def _fill(self, place: memoryview, wait: Callable[[], object], took: Callable[[int], object]) -> None:
        """Reads until `place` is full, and is woken for much of it at once: to be woken takes as long as to
        read 100 KB.
        """
        asked, untold = 1, 0
        try:
            while place:
                try:
                    came = self._connection.recv_into(place)
                except BlockingIOError:
                    if self._wakes_late and asked != (asked := min(len(place), MOST_AT_ONCE)):
                        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, asked)
                    wait()
                    continue
                if not came:
                    raise ConnectionError("it was closed within a frame")
                place = place[came:]
                self._unread -= came
                untold += came
                if untold >= MOST_AT_ONCE or not place:
                    took(untold)
                    untold = 0
        finally:
            if asked != 1:
                self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def _read(self, place: memoryview, wait: Callable[[], object]) -> int:
        while True:
            try:
                return self._connection.recv_into(place)
            except BlockingIOError:
                wait()


class Incoming:
    """Frames as they come, in pieces of any size: `place` is where the next bytes go. They are whole messages
    of the other end, one at a time.
    """

    def __init__(self) -> None:
        self.most = ANY_SIZE  # bytes of the next frame
        self._first = memoryview(bytearray(FIRST_BYTES))
        self._begin()

    def _begin(self) -> None:
        self._came = 0  # of the first bytes, until the message's size is known
        self._whole: bytearray | None = None  # a message that is longer than these
        self._message: bytes | None = None
        self._data: memoryview | None = None
        self._more = 0  # bytes of data
        self.place = self._first

    def took(self, count: int) -> tuple[bytes, memoryview | None] | None:
        """The message, and the data behind it, where they are whole with so many bytes that came to `place`.
        Raises ValueError where they are none.
        """
        self.place = self.place[count:]
        if self._message is None and not self._read(count):
            return None
        if self.place:
            return None
        assert self._message is not None
        found = self._message, self._data
        self._begin()
        return found

    def _read(self, count: int) -> bool:
        """Whether the message is there, and `place` is where the rest of the data goes."""
        if self._whole is not None:
            if self.place:
                return False
            self._behind(bytes(self._whole), self.place)
            return True
        self._came += count
        if self._came < HEADER.size:
            return False
        size, self._more = _sizes(self._first[: self._came], self.most)
        there = self._first[HEADER.size : self._came]
        if len(there) >= size:
            self._behind(bytes(there[:size]), there[size:])
            return True
        self._whole = bytearray(size)
        self._whole[: len(there)] = there
        self.place = memoryview(self._whole)[len(there) :]
        return False

    def _behind(self, message: bytes, there: memoryview) -> None:
        """The message is whole, and so much of the data is there."""
        self._message = message
        if self._more:
            self._data = fresh_room(self._more)
            self._data[: len(there)] = there
            self.place = self._data[len(there) :]
        else:
            self.place = there[:0]
