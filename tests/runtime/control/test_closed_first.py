"""A connection by which others see the end of a process is closed before what takes long to close."""

from __future__ import annotations

import resource
import socket

import pytest

from moeserve.runtime.control.stream import HIGH, HIGH_ROOM, closed_first


def test_a_connection_goes_on_under_a_high_descriptor() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.settimeout(3.0)
        low = ours.fileno()
        with closed_first(ours) as moved:
            most = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], HIGH)
            assert most - HIGH_ROOM <= moved.fileno() < most and moved.fileno() > low
            assert moved.gettimeout() == 3.0 and not moved.get_inheritable()
            moved.sendall(b"there")
            assert theirs.recv(5) == b"there"
            theirs.sendall(b"back")
            assert moved.recv(4) == b"back"
        assert theirs.recv(1) == b"", "nobody else holds it"


def test_a_connection_that_cannot_be_moved_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (HIGH_ROOM // 2, HIGH_ROOM))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        moved = closed_first(ours)
        assert moved is ours
        moved.sendall(b"there")
        assert theirs.recv(5) == b"there"
