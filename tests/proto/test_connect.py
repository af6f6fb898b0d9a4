"""A client waits for a connection that takes its time, and finds a service that comes back at once."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from proto_fake import FakeService

from moeserve.proto.client import MoeClient

SLOW_SECONDS = 0.8


def piped(source: socket.socket, sink: socket.socket) -> None:
    """Hands bytes on until either end closes."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def slowly(service: FakeService) -> Iterator[str]:
    """An address behind which the service is, but every connection takes a while to stand."""
    listener = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = []

    def join(client: socket.socket) -> None:
        time.sleep(SLOW_SECONDS)
        host, port = service.address.rsplit(":", 1)
        there = socket.create_connection((host, int(port)), 5)
        ends.append(there)
        for pair in ((client, there), (there, client)):
            threading.Thread(target=piped, args=pair, daemon=True).start()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                ends.append(client)
                threading.Thread(target=join, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for end in ends:
        end.close()


def test_a_connection_that_takes_its_time_is_waited_for(slowly: str) -> None:
    with MoeClient(slowly, timeout=10.0) as client:
        assert client.status().state == "serving"
