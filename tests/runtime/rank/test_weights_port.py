"""Strangers at the port from which experts are copied: few at once, not for long, and peers come in again."""

from __future__ import annotations

import errno
import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from moeserve.runtime.control.frames import encoded
from moeserve.runtime.control.stream import HELLO_BYTES, Stream, StreamClosed, connect
from moeserve.runtime.keys.keys import Keys
from moeserve.runtime.rank.weights.peers import WeightsServer
from moeserve.runtime.sections import KeysConfig

TOKEN, SECONDS = "a token of the run", 5.0


class Bank:
    """Experts that are not there; a device that fails."""

    def slot(self, layer: int, slot: int) -> None:
        if layer == 13:
            raise RuntimeError("the device is lost")
        raise KeyError(f"layer {layer} is not held")


@pytest.fixture
def server() -> Iterator[WeightsServer]:
    bank: Any = Bank()
    made = WeightsServer("127.0.0.1", Keys(KeysConfig(), TOKEN), "cpu", bank)
    yield made
    made.close()


def answered(server: WeightsServer) -> bool:
    """Whether a peer with the token is answered."""
    peer = connect(server.address, SECONDS)
    peer.bound_receives(SECONDS)
    try:
        peer.send({"kind": "weights", "token": TOKEN})
        peer.send({"kind": "slots", "layer": 1, "slots": [0], "how": "stream"})
        return bool(peer.receive()["kind"] == "refused")
    except StreamClosed:
        return False
    finally:
        peer.close()


def closed_within(stream: Stream, seconds: float) -> bool:
    stream.bound_receives(seconds)
    try:
        stream.receive()
    except StreamClosed as closed:
        return "timed out" not in str(closed)
    return False


def until(true: Any) -> None:
    limit = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)


def guests() -> int:
    return sum(thread.name.startswith("weights (") for thread in threading.enumerate())


def test_strangers_are_few_and_not_waited_for(
    server: WeightsServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.hello_seconds = 1.0
    most = server._acceptors[0].most
    strangers = [connect(server.address, SECONDS) for _ in range(most)]
    until(lambda: guests() == most)
    assert closed_within(connect(server.address, SECONDS), 0.5)
    assert f"{most} strangers have yet to show the token" in caplog.text
    assert all(closed_within(stranger, SECONDS) for stranger in strangers)
    assert "refused weights to" in caplog.text and "timed out" in caplog.text
    assert answered(server)
    until(lambda: not guests())


def test_a_peer_that_has_shown_the_token_is_no_stranger(server: WeightsServer) -> None:
    most = server._acceptors[0].most
    known = [connect(server.address, SECONDS) for _ in range(most)]
    for one in known:
        one.send({"kind": "weights", "token": TOKEN})
    until(lambda: server._acceptors[0]._strangers._value == most)
    assert answered(server)
    for one in known:
        one.close()


@pytest.mark.parametrize(
    "said",
    [
        struct.pack("<I", HELLO_BYTES + 1),
        struct.pack("<I", 1) + b"\x80",
        encoded({"kind": "weights"}),
        encoded({"kind": "weights", "token": "wrong"}),
    ],
    ids=["long", "empty", "no token", "wrong token"],
)
def test_who_says_another_thing_than_the_token_is_refused_and_logged(
    server: WeightsServer, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), SECONDS) as made:
        made.sendall(said)
        assert made.recv(1) == b""
    until(lambda: "refused weights to" in caplog.text)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("what", ["descriptors", "threads"])
def test_want_of_descriptors_or_threads_ends_nothing(
    server: WeightsServer, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    acceptor, wanting = server._acceptors[0], threading.Event()
    listener = acceptor.listener
    if what == "descriptors":

        def accept() -> Any:
            if not wanting.is_set():
                wanting.set()
                raise OSError(errno.EMFILE, "Too many open files")
            return listener.accept()

        monkeypatch.setattr(acceptor, "listener", SimpleNamespace(accept=accept))
        assert answered(server)  # by the accept that was under way
    else:
        start = threading.Thread.start

        def begin(thread: threading.Thread) -> None:
            if thread.name.startswith("weights (") and not wanting.is_set():
                wanting.set()
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", begin)
        assert not answered(server)
    assert answered(server) and wanting.is_set()
    assert "Too many open files" in caplog.text or "can't start new thread" in caplog.text
    monkeypatch.undo()


def test_what_ends_a_peers_thread_is_said(server: WeightsServer, caplog: pytest.LogCaptureFixture) -> None:
    peer = connect(server.address, SECONDS)
    peer.send({"kind": "weights", "token": TOKEN})
    peer.send({"kind": "slots", "layer": 13, "slots": [0], "how": "stream"})
    assert closed_within(peer, SECONDS)
    until(lambda: "the device is lost" in caplog.text)
    assert answered(server)
