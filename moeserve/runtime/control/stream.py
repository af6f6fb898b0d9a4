"""The coordinator's persistent streams: small framed messages over TCP, in order, without delay.

A frame is a four-byte little-endian length and that many bytes of UTF-8 JSON, one object with a `kind`.
Tensors never
travel here. A plain socket and not gRPC, because a step costs two of these hops and gRPC's take five times
longer.
"""

from __future__ import annotations

import io
import json
import socket
import struct
import threading
from typing import Any

Message = dict[str, Any]

_LENGTH = struct.Struct("<I")
_LIMIT = 1 << 26  # a placement of 58 layers x 1024 slots is 0.5 MB


class StreamClosed(ConnectionError):
    """The other end is gone, or sent something that is not a frame."""


class Stream:
    """One connected socket. `send` is safe from several threads; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.settimeout(None)
        self._socket = connection
        self._reader: io.BufferedReader = connection.makefile("rb", buffering=1 << 16)  # type: ignore[assignment]
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Sends one message. Raises StreamClosed when the other end is gone."""
        body = json.dumps(message, separators=(",", ":")).encode()
        try:
            with self._lock:
                self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise StreamClosed(str(error)) from error

    def receive(self, within: float | None = None) -> Message:
        """The next message; blocks for `within` seconds at most, or without a bound.

        Raises StreamClosed at the end, and when a bound has passed: the stream is of no use then.
        """
        try:
            if within is not None:
                self._socket.settimeout(within)
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
            if length > _LIMIT:
                raise StreamClosed(f"a frame of {length} bytes is over the limit of {_LIMIT}")
            message = json.loads(self._read(length))
            if within is not None:
                self._socket.settimeout(None)
        except (OSError, ValueError) as error:
            raise StreamClosed(str(error)) from error
        if not isinstance(message, dict) or "kind" not in message:
            raise StreamClosed("a frame must be an object with a kind")
        return message

    def send_bytes(self, data: memoryview) -> None:
        """Sends raw bytes behind a message that announced them. Raises StreamClosed."""
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError as error:
            raise StreamClosed(str(error)) from error

    def receive_bytes(self, into: memoryview) -> None:
        """Fills `into` with the raw bytes that come next. Raises StreamClosed."""
        try:
            read = self._reader.readinto(into)
        except OSError as error:
            raise StreamClosed(str(error)) from error
        if read is None or read < len(into):
            raise StreamClosed("the other end closed the stream")

    def _read(self, size: int) -> bytes:
        data: bytes | None = self._reader.read(size)
        if data is None or len(data) < size:
            raise StreamClosed("the other end closed the stream")
        return data

    def close(self) -> None:
        """Closes both directions; a thread blocked in `receive` gets StreamClosed."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end closed first
        finally:
            self._socket.close()


def connect(address: str, timeout: float) -> Stream:
    """A stream to `host:port`. Raises StreamClosed when nobody answers within `timeout` seconds."""
    host, port = address.rsplit(":", 1)
    try:
        return Stream(socket.create_connection((host, int(port)), timeout))
    except OSError as error:
        raise StreamClosed(f"cannot reach {address}: {error}") from error
