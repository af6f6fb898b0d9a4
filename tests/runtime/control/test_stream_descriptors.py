"""A stream that has ended gives its descriptor back at once, and waits for no collection of garbage."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from moeserve.runtime.control.acceptor import Acceptor, Guest
from moeserve.runtime.control.frames import encoded
from moeserve.runtime.control.stream import Stream, StreamClosed

SECONDS, GUESTS = 10.0, 20
HELLO = encoded({"kind": "weights", "token": "x"})


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("sent", [b"", b"\0\0", HELLO[:-3], HELLO, struct.pack("<I", 1 << 31) + b"x" * 10])
def test_strangers_leave_no_descriptor_behind(sent: bytes) -> None:
    ended = threading.Semaphore(0)

    def serve(guest: Guest) -> None:
        stream = Stream(guest.connection)
        try:
            stream.receive_first(SECONDS)
            stream.receive()
        except StreamClosed:
            pass
        finally:
            stream.close()
            ended.release()

    acceptor = Acceptor(socket.create_server(("127.0.0.1", 0)), "test", serve)
    acceptor.start()
    try:
        with uncollected():
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(GUESTS):
                with socket.create_connection(acceptor.listener.getsockname()) as guest:
                    guest.sendall(sent)
                assert ended.acquire(timeout=SECONDS)
            assert len(os.listdir("/proc/self/fd")) <= before + 2  # the last thread may be about to end
    finally:
        acceptor.close()
