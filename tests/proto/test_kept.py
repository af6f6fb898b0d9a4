"""Idle connections of a client: all of as many callers as are asked for, no more, and not for ever."""

from __future__ import annotations

import pytest

from moeserve.proto.transports import kept as module
from moeserve.proto.transports.kept import MOST_IDLE, Kept

CALLERS = 64


class Line:
    fresh = True
    closed = False

    def close(self) -> None:
        self.closed = True


def test_64_callers_at_once_find_their_connections_again() -> None:
    kept = Kept[Line]()
    lines = [Line() for _ in range(CALLERS)]
    for line in lines:
        kept.give(line)
    assert not any(line.closed for line in lines)
    assert {kept.idle() for _ in lines} == set(lines)
    assert kept.idle() is None


def test_more_than_are_kept_are_closed_and_so_is_what_nobody_has_used_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = Kept[Line]()
    lines = [Line() for _ in range(MOST_IDLE + 2)]
    for line in lines:
        kept.give(line)
    assert [line.closed for line in lines] == [False] * MOST_IDLE + [True] * 2
    last = kept.idle()
    monkeypatch.setattr(module, "IDLE_SECONDS", -1.0)
    assert last is lines[MOST_IDLE - 1]
    kept.give(last)
    assert all(line.closed for line in lines)
