"""HTTP/2 by hand, as no client library would speak it: frames of a connection to a gRPC server."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW_SIZE = 4
CANCEL = 8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
Frame = tuple[int, int, int, bytes]  # kind, flags, stream, payload


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame's bytes."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def settings(**values: int) -> bytes:
    """A SETTINGS frame; `window` is the initial window size."""
    known = {"window": INITIAL_WINDOW_SIZE}
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", known[k], v) for k, v in values.items()))


def headers(path: str) -> bytes:
    """The header block of a gRPC request: literal fields that are not indexed, no Huffman code."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b""
    for name, value in fields.items():
        block += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return block


def message(body: bytes) -> bytes:
    """A gRPC message as it lies in DATA frames."""
    return b"\0" + struct.pack(">I", len(body)) + body


class RawConnection:
    """A connection whose client says what a test wants, and reads only when the test does."""

    def __init__(self, address: str, **values: int) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=20)
        self.socket.sendall(PREFACE + settings(**values))
        self._stream = -1
        self._read = b""

    def begin(self, path: str) -> int:
        """Sends the headers of a call; returns its stream."""
        self._stream += 2
        self.socket.sendall(frame(HEADERS, END_HEADERS, self._stream, headers(path)))
        return self._stream

    def ask(self, path: str, body: bytes) -> int:
        """Sends a whole call, in frames of at most 16 KiB; returns its stream."""
        stream, data = self.begin(path), message(body)
        for at in range(0, len(data), 16384):
            last = END_STREAM if at + 16384 >= len(data) else 0
            self.socket.sendall(frame(DATA, last, stream, data[at : at + 16384]))
        return stream

    def frames(self, seconds: float) -> list[Frame]:
        """What came within so many seconds of silence; empty also where the connection is closed."""
        self.socket.settimeout(seconds)
        with suppress(OSError):
            while data := self.socket.recv(1 << 16):
                self._read += data
        found = []
        while len(self._read) >= 9:
            length = int.from_bytes(self._read[:3], "big")
            if len(self._read) < 9 + length:
                break
            kind, flags, stream = self._read[3], self._read[4], int.from_bytes(self._read[5:9], "big")
            found.append((kind, flags, stream, self._read[9 : 9 + length]))
            self._read = self._read[9 + length :]
        return found

    def reset(self) -> None:
        """Ends the connection with a TCP reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def close(self) -> None:
        """Ends the connection."""
        self.socket.close()
