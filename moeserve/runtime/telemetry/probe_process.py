"""Answers probes in a process of its own: `/livez`, `/readyz`, `/startupz` and grpc.health.v1, on one port.

The service's process says several times a second, over this one's stdin, why layers cannot be served now.
Parsing a large message, or receiving one, holds the interpreter there, and so does much else; here nothing
does. What is heard no more counts as not serving. It imports gRPC and nothing of the runtime, and ends with
its stdin.

    python -m moeserve.runtime.telemetry.probe_process LISTENER SOCKET STALLED_SECONDS CERTIFICATE KEY NAME...

LISTENER is the descriptor of a listening socket, which outlives this process; SOCKET the path of a Unix
socket by which it hands connections of gRPC to its own server. CERTIFICATE and KEY are paths of PEM files,
read again when they change, or empty where probes come without TLS. Each NAME is a service's.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from grpc import StatusCode, aio, method_handlers_generic_handler
from grpc import unary_stream_rpc_method_handler as stream_handler
from grpc import unary_unary_rpc_method_handler as unary_handler

ALIVE, READY, STARTED = "/livez", "/readyz", "/startupz"
PREFACE = b"PRI * HTTP/2.0"  # how a connection of gRPC begins
REQUEST_SECONDS = 5.0  # within which a request has to arrive
PR_SET_PDEATHSIG = 1  # of prctl: the signal that comes with the end of the parent
MOST_CONNECTIONS = 512  # beyond, the one that has been open for longest is closed
MOST_BYTES = 8192  # of a request
LOOK_SECONDS = 0.1  # between looks whether watchers are to be told something else
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3


class Certificate:
    """Contexts with the certificate as its files have it now. Probes show none of their own."""

    def __init__(self, certificate: str, key: str) -> None:
        self._paths = certificate, key
        self._seen = self._stamps()
        self._made = self._read()

    def context(self) -> ssl.SSLContext:
        """For a server: each connection gets the certificate of its time."""
        first = self._read()
        first.sni_callback = self._chosen  # called for every connection, also for one that names no host
        return first

    def _chosen(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        with suppress(OSError):  # a file that cannot be read now is tried again by the next connection
            self._look()
        connection.context = self._made

    def _look(self) -> None:
        """Reads files that have changed. Raises OSError for one that cannot be read now."""
        stamps = self._stamps()
        if stamps == self._seen:
            return
        with suppress(ssl.SSLError, ValueError):  # what was before stays; the head's log says what is wrong
            self._made = self._read()
        self._seen = stamps

    def _stamps(self) -> list[tuple[int, int, int, int]]:
        found = [os.stat(path) for path in self._paths]
        return [(one.st_mtime_ns, one.st_ctime_ns, one.st_size, one.st_ino) for one in found]

    def _read(self) -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.load_cert_chain(*self._paths, password=_no_password)
        # gRPC's clients offer h2 alone; who offers both, as curl and the kubelet do, asks by GET
        made.set_alpn_protocols(["http/1.1", "h2"])
        return made


def _no_password() -> str:
    raise ValueError("the private key is encrypted")


class State:
    """What the service's process said last."""

    def __init__(self, stalled_seconds: float) -> None:
        self._stalled_seconds = stalled_seconds
        self._why = "it is starting"
        self._heard = time.monotonic()
        self.has_served = False

    def hear(self, why: str) -> None:
        """Layers cannot be served because of `why`; empty where they can."""
        self._why, self._heard = why, time.monotonic()
        self.has_served = self.has_served or not why

    def stalled(self) -> str:
        """Why the process does not count as alive; empty where it does."""
        silent = time.monotonic() - self._heard
        return f"its process has said nothing for {silent:.1f} s" if silent > self._stalled_seconds else ""

    def why_not(self) -> str:
        """Why layers cannot be served; empty while they can."""
        return self.stalled() or self._why


def answer_of(state: State, path: str) -> tuple[int, str]:
    """HTTP status and text for a path."""
    if path == ALIVE:
        why = state.stalled()
        return (503, f"not alive: {why}") if why else (200, "alive")
    if path == READY:
        why = state.why_not()
        return (503, f"not serving: {why}") if why else (200, "serving")
    if path == STARTED:
        why = state.stalled() or ("" if state.has_served else state.why_not())
        return (503, f"not started: {why}") if why else (200, "started")
    return 404, f"there are {ALIVE}, {READY} and {STARTED}"


class Answers:
    """Takes connections, and answers those of HTTP; those of gRPC are its server's."""

    def __init__(self, state: State, grpc_address: str) -> None:
        self._state = state
        self._grpc_address = grpc_address
        self._open: dict[asyncio.StreamWriter, None] = {}  # the oldest first

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one connection."""
        self._open[writer] = None
        if len(self._open) > MOST_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.close()
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                begun = await reader.readexactly(len(PREFACE))
                if begun != PREFACE:
                    await self._answer(begun, reader, writer)
            if begun == PREFACE:
                await self._hand_on(begun, reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever asked has left, or says nothing
        finally:
            self._open.pop(writer, None)
            writer.close()

    async def _answer(self, begun: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = begun + await reader.readuntil(b"\r\n\r\n")
        words = request.split(b"\r\n", 1)[0].split(b" ")
        path = words[1].partition(b"?")[0].decode("latin-1") if len(words) == 3 else ""
        status, text = answer_of(self._state, path)
        body = b"" if words[0] == b"HEAD" else f"{text}\n".encode(errors="replace")
        head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'No'}\r\nContent-Length: {len(body)}\r\n"
        head += "Content-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    async def _hand_on(
        self, begun: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        inner_reader, inner = await asyncio.open_unix_connection(self._grpc_address)
        inner.write(begun)
        ways = (asyncio.create_task(pump(reader, inner)), asyncio.create_task(pump(inner_reader, writer)))
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            inner.close()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies bytes until one side is closed."""
    with suppress(OSError):
        while data := await reader.read(1 << 14):
            writer.write(data)
            await writer.drain()


class GrpcHealth:
    """grpc.health.v1, its two small messages coded by hand."""

    def __init__(self, state: State, services: list[str]) -> None:
        self._state = state
        self._services = frozenset(("", *services))

    def _status(self) -> int:
        return NOT_SERVING if self._state.why_not() else SERVING

    async def check(self, request: bytes, context: aio.ServicerContext[bytes, bytes]) -> bytes:
        """The status of a service; NOT_FOUND for one that is not there."""
        if service_in(request) not in self._services:
            await context.abort(StatusCode.NOT_FOUND, "")
        return bytes((8, self._status()))

    async def watch(self, request: bytes, context: aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
        """The status of a service, now and whenever it changes."""
        known, last = service_in(request) in self._services, 0
        while True:
            status = self._status() if known else SERVICE_UNKNOWN
            if status != last:
                yield bytes((8, status))
                last = status
            await asyncio.sleep(LOOK_SECONDS)

    def handler(self) -> object:
        """What a server takes."""
        return method_handlers_generic_handler(
            "grpc.health.v1.Health",
            {"Check": unary_handler(self.check), "Watch": stream_handler(self.watch)},
        )


def service_in(request: bytes) -> str:
    """The service that a HealthCheckRequest names: field 1, of at most 127 bytes; else no service has it."""
    if not request:
        return ""
    if request[0] == 10 and len(request) >= 2 and request[1] == len(request) - 2 < 128:
        return request[2:].decode(errors="replace")
    return "?"


async def listen_to(state: State) -> None:
    """Hears the service's process until it ends."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=1 << 16)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    while line := await reader.readline():
        state.hear(str(json.loads(line)["why"]))


async def main() -> None:
    """Answers until stdin ends."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    inside, state, files, services = sys.argv[2], State(float(sys.argv[3])), sys.argv[4:6], sys.argv[6:]
    tls: dict[str, Any] = {}
    if files[0]:
        tls = {"ssl": Certificate(*files).context(), "ssl_handshake_timeout": REQUEST_SECONDS}
    options = [("grpc.max_receive_message_length", MOST_BYTES), ("grpc.max_concurrent_streams", 64)]
    inner = aio.server(options=options, maximum_concurrent_rpcs=4 * MOST_CONNECTIONS)
    inner.add_generic_rpc_handlers((GrpcHealth(state, services).handler(),))
    inner.add_insecure_port(f"unix:{inside}")
    await inner.start()
    answers = Answers(state, inside)
    server = await asyncio.start_server(answers.take, sock=listener, limit=MOST_BYTES, backlog=1024, **tls)
    await listen_to(state)
    server.close()
    await inner.stop(0)


def end_with_parent() -> None:
    """Has the kernel kill this process when the one that started it ends, also while it is stopped."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # which may reach all: the head ends this
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(main())
