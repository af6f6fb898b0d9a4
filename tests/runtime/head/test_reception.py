"""Ranks' streams at the head: who takes a seat gives it up again, and an end stays an end."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import make_checkpoint
from fake_members import SECONDS, TOKEN, head_of, until
from houses import house_config

from moeserve.proto import heap
from moeserve.runtime.control.frames import LENGTH, encoded
from moeserve.runtime.control.stream import HELLO_BYTES, Stream, StreamClosed, connect
from moeserve.runtime.head import reception
from moeserve.runtime.head.coordinator import Coordinator, Progress
from moeserve.runtime.launch.head_process import HeadProcess


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with head_of() as made:
        yield made


def introduced(coordinator: Coordinator, rank: int, **more: Any) -> Stream:
    """The stream of a rank that has said hello."""
    stream = connect(coordinator.address, SECONDS)
    hello = {"kind": "hello", "rank": rank, "token": TOKEN, "pid": 7, "address": "", "host_id": "here"}
    stream.send(hello | more)
    return stream


def closed_within(stream: Stream, seconds: float) -> bool:
    """Whether the head closes the stream, whatever it sends before."""
    stream._socket.settimeout(seconds)
    try:
        while True:
            stream.receive()
    except StreamClosed as closed:
        return "timed out" not in str(closed)


def failed(coordinator: Coordinator, refusal: str) -> None:
    """Has the group fail: rank 1 says that it can never start."""
    with_reason = introduced(coordinator, 1, refused=refusal, for_good=True)
    until(lambda: coordinator.progress().state == "failed")
    with_reason.close()


def test_a_seat_is_given_up_when_its_thread_cannot_go_on(coordinator: Coordinator) -> None:
    stream = introduced(coordinator, 0)
    until(lambda: 0 in coordinator.seats())
    stream.send({"kind": "report", "generation": 0, "steps": float("inf"), "expert_rows": 0, "load": []})
    until(lambda: not coordinator.seats())
    assert "rank 0 (pid 7) is lost" in coordinator.progress().reason
    stream.close()


def test_a_seat_is_given_up_when_taking_it_fails(coordinator: Coordinator) -> None:
    def broken(progress: object) -> None:
        coordinator.on_change = lambda progress: None
        raise RuntimeError("a listener of the state fails")

    coordinator.on_change = broken
    stream = introduced(coordinator, 0)
    assert closed_within(stream, SECONDS)
    until(lambda: not coordinator.seats())
    again = introduced(coordinator, 0)
    until(lambda: 0 in coordinator.seats())
    again.close()


def test_a_lost_rank_leaves_the_reason_of_a_failure(coordinator: Coordinator) -> None:
    stream = introduced(coordinator, 0)
    until(lambda: 0 in coordinator.seats())
    failed(coordinator, "rank 1 cannot start: no memory")
    stream.close()
    until(lambda: not coordinator.seats())
    assert (coordinator.progress().state, coordinator.progress().reason) == (
        "failed",
        "rank 1 cannot start: no memory",
    )
    with pytest.raises(RuntimeError, match="no memory"):
        coordinator.wait_serving(SECONDS)


def test_votes_that_come_after_a_failure_change_nothing(coordinator: Coordinator) -> None:
    streams = [introduced(coordinator, rank) for rank in range(2)]
    generation = {stream.receive()["generation"] for stream in streams}.pop()
    failed(coordinator, "rank 1 cannot start: no memory")
    for stream in streams:
        stream.send(
            {"kind": "prepared", "generation": generation, "bytes_read": 0, "weight_bytes": 0, "lacks": []}
        )
        stream.send({"kind": "nonsense", "generation": generation})  # heard, then refused: the votes were too
        assert closed_within(stream, SECONDS)
    assert coordinator.progress().state == "failed"


def test_a_rank_that_comes_again_takes_the_seat_and_the_old_stream_ends(coordinator: Coordinator) -> None:
    old = introduced(coordinator, 0)
    until(lambda: 0 in coordinator.seats())
    new = introduced(coordinator, 0, pid=8)
    assert closed_within(old, SECONDS)
    until(lambda: coordinator.seats()[0].pid == 8)
    new.close()


def test_a_stranger_that_says_nothing_is_not_waited_for(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "HELLO_SECONDS", 0.1, raising=False)
    silent = connect(coordinator.address, SECONDS)
    assert closed_within(silent, SECONDS)
    slow = introduced(coordinator, 0)  # and who has said hello may be silent as long as it likes
    until(lambda: 0 in coordinator.seats())
    time.sleep(0.3)
    assert 0 in coordinator.seats()
    slow.close()


def dribble(address: str, ends: threading.Event) -> socket.socket:
    """A connection over which a byte comes now and then, of a hello that never ends."""
    host, port = address.rsplit(":", 1)
    made = socket.create_connection((host, int(port)), SECONDS)
    made.sendall(struct.pack("<I", 1000))

    def send() -> None:
        with contextlib.suppress(OSError):
            while not ends.wait(0.05):
                made.sendall(b" ")

    threading.Thread(target=send, daemon=True).start()
    return made


def test_a_stranger_that_says_hello_slowly_is_not_waited_for(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "HELLO_SECONDS", 0.3)
    ends = threading.Event()
    with dribble(coordinator.address, ends) as slow:
        slow.settimeout(SECONDS)
        with contextlib.suppress(ConnectionResetError):
            assert slow.recv(1) == b""
        ends.set()


@pytest.mark.parametrize("frame", [HELLO_BYTES + 1, 1 << 26])
def test_a_stranger_may_not_send_more_than_a_hello(coordinator: Coordinator, frame: int) -> None:
    host, port = coordinator.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), SECONDS) as made:
        made.sendall(struct.pack("<I", frame))
        assert made.recv(1) == b""


@pytest.mark.parametrize(
    "said",
    [
        b"\x91" * 100_000,
        b"\x80",
        b"\x90",
        b'{"kind": "hello"}',
        encoded({"kind": "hello"})[LENGTH.size :],
        encoded({"kind": "hello", "token": "\u00fc", "rank": float("inf")})[LENGTH.size :],
        b"\xdf\xff\xff\xff\xff",
        b"",
    ],
    ids=["deep", "empty", "list", "JSON", "no token", "no rank", "a large map", "nothing"],
)
def test_a_stranger_that_says_nonsense_is_refused_without_a_traceback(
    coordinator: Coordinator, said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = coordinator.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), SECONDS) as made:
        made.sendall(struct.pack("<I", len(said)) + said)
        assert made.recv(1) == b""
    assert not [record for record in caplog.records if record.exc_info]


def test_strangers_are_limited_and_ranks_come_in_again(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "HELLO_SECONDS", 3.0)
    most = coordinator._reception._acceptor.most
    strangers = [connect(coordinator.address, SECONDS) for _ in range(most)]
    until(lambda: sum(thread.name.startswith("rank (") for thread in threading.enumerate()) == most)
    assert closed_within(connect(coordinator.address, SECONDS), 1.5)
    for stranger in strangers:
        assert closed_within(stranger, SECONDS)
    rank = introduced(coordinator, 0)
    until(lambda: 0 in coordinator.seats())
    rank.close()


def test_a_connection_that_cannot_be_accepted_is_not_the_last(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, refused = coordinator._reception._acceptor.listener, threading.Event()

    class Exhausted:
        def accept(self) -> tuple[socket.socket, object]:
            if not refused.is_set():
                refused.set()
                raise OSError(errno.EMFILE, "Too many open files")
            return listener.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

    monkeypatch.setattr(coordinator._reception._acceptor, "listener", Exhausted())
    for rank in range(2):  # the first comes to who accepts already
        stream = introduced(coordinator, rank)
        until(lambda rank=rank: rank in coordinator.seats())
        stream.close()
    assert refused.is_set()


def test_the_head_leaves_its_callers_process_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []

    def opened(name: str | None) -> ctypes.CDLL:
        loaded.append(name)
        return ctypes.CDLL(name)

    monkeypatch.setattr(heap, "ctypes", SimpleNamespace(CDLL=opened))
    make_checkpoint("qwen3_moe", tmp_path)
    before = sys.getswitchinterval()
    head = HeadProcess(house_config(tmp_path), "127.0.0.1")
    try:
        assert sys.getswitchinterval() == before
        assert not loaded
    finally:
        head.stop()
        sys.setswitchinterval(before)


def test_the_group_fails_with_the_reason_when_its_pace_cannot_go_on(coordinator: Coordinator) -> None:
    def broken(progress: Progress) -> None:
        if progress.state == "preparing":
            raise RuntimeError("a listener of the state fails")

    coordinator.on_change = broken
    streams = [introduced(coordinator, rank) for rank in range(2)]
    with pytest.raises(RuntimeError, match="RuntimeError: a listener of the state fails"):
        coordinator.wait_serving(SECONDS)
    for stream in streams:
        stream.close()
