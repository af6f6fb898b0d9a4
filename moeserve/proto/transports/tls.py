"""`TlsSocket`: a connected TCP socket that speaks TLS, for streams that one thread reads and others write.

`ssl.SSLSocket` is not made for that: OpenSSL's state may not be used by two threads at once, and a lock held
while a thread waits for bytes would keep the others from writing. Here OpenSSL works on memory, under a lock
that nobody waits under, and the bytes go through the plain socket beside it.
"""

from __future__ import annotations

import io
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

PIECE = 1 << 18
"""Bytes that are encrypted, or asked of the socket, at once."""

_NOTHING = memoryview(b"")


class TlsSocket:
    """TLS over `connection`, which it owns; `handshake` comes first.

    server_name: the name that the other end's certificate must have, where this end is the client; None
    where it is the server.
    """

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, server_name: str | None = None
    ) -> None:
        self._socket = connection
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._lock = threading.Lock()  # of what OpenSSL works on
        self._sending = threading.Lock()  # records go out in the order in which they were made
        self._records = _NOTHING  # that were made by `send_some`, and are not sent

    def handshake(self, within: float) -> None:
        """Agrees on keys with the other end within so many seconds. Raises OSError, such as TimeoutError."""
        until = time.monotonic() + within
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                left = until - time.monotonic()  # however often a byte comes
                self._socket.settimeout(max(1e-3, left))
                try:
                    if left <= 0:
                        raise TimeoutError
                    self._flush()
                    self._take(self._socket.recv(PIECE))
                except TimeoutError:
                    raise TimeoutError(f"timed out: TLS took longer than {within:g} s") from None
            except ssl.SSLError:
                self._flush()  # the alert that says why
                raise
            else:
                self._flush()
                self._socket.settimeout(None)
                return

    def names(self) -> list[str]:
        """The names in the other end's certificate; none where it showed none."""
        return certificate_names(self._tls.getpeercert())

    def fileno(self) -> int:
        """The descriptor of the connection."""
        return self._socket.fileno()

    def sendall(self, data: bytes | memoryview) -> None:
        """Sends all of `data`, as `socket.socket.sendall`."""
        view = memoryview(data).cast("B")
        with self._sending:
            at = 0
            while at < len(view):
                with self._lock:
                    at += self._tls.write(view[at : at + PIECE])
                    records = self._outgoing.read()
                self._socket.sendall(records)

    def send_some(self, left: Sequence[memoryview]) -> list[memoryview]:
        """Sends as much of some bytes as a connection that does not block takes now; returns what is left:
        one empty view where all was encrypted, and is not sent. Raises OSError.
        """
        parts = [part.cast("B") for part in left if part.nbytes]
        if len(parts) > 1 and sum(map(len, parts)) <= PIECE:
            parts = [memoryview(b"".join(parts))]  # one record, or few
        with self._sending:
            while True:
                if not self._records:
                    if not parts:
                        return []
                    with self._lock:
                        made = self._tls.write(parts[0][:PIECE])
                        self._records = memoryview(self._outgoing.read())
                    parts = [parts[0][made:], *parts[1:]] if made < len(parts[0]) else parts[1:]
                try:
                    sent = self._socket.send(self._records)
                except BlockingIOError:
                    return parts or [_NOTHING]
                self._records = self._records[sent:]

    def recv_into(self, into: memoryview) -> int:
        """Reads what is there into `into`, waiting for the first byte; 0 at the end. Raises BlockingIOError
        where the connection does not block, and nothing whole is there.
        """
        if not (self._incoming.pending or self._tls.pending() or self._incoming.eof):
            self._take(self._socket.recv(PIECE))  # at once: to ask OpenSSL for what is not there takes 3 us
        while True:
            with self._lock:
                try:
                    read: Any = self._tls.read(len(into), into)  # typed as if it returned the bytes
                    return int(read)
                except ssl.SSLWantReadError:
                    pass
                except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                    return 0
            self._take(self._socket.recv(PIECE))

    def makefile(self, mode: str, buffering: int) -> io.BufferedReader:
        """A buffered reader, as `socket.socket.makefile("rb", buffering)` gives."""
        if mode != "rb":
            raise ValueError(f"a TLS stream is read as 'rb', not {mode!r}")
        return io.BufferedReader(_Raw(self), buffering)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """As of the plain socket."""
        self._socket.setsockopt(level, option, value)

    def settimeout(self, seconds: float | None) -> None:
        """As of the plain socket: of each wait for it."""
        self._socket.settimeout(seconds)

    def gettimeout(self) -> float | None:
        """As of the plain socket."""
        return self._socket.gettimeout()

    def shutdown(self, how: int) -> None:
        """As of the plain socket; no alert says so."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """As of the plain socket."""
        self._socket.close()

    def _take(self, data: bytes) -> None:
        with self._lock:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()

    def _flush(self) -> None:
        if records := self._outgoing.read():
            self._socket.sendall(records)


class _Raw(io.RawIOBase):
    """The reading half of a TlsSocket, for a buffered reader."""

    def __init__(self, connection: TlsSocket) -> None:
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, into: memoryview) -> int:  # type: ignore[override]
        return self._connection.recv_into(memoryview(into))


def certificate_names(certificate: Mapping[str, Any] | None) -> list[str]:
    """Common name and alternative names of a certificate, as `getpeercert` gives it."""
    found = certificate or {}
    common = [value for part in found.get("subject", ()) for key, value in part if key == "commonName"]
    return common + [value for _, value in found.get("subjectAltName", ())]
