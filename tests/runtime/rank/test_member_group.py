"""A process group that does not form: a member that dies meanwhile holds nobody."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from moeserve.runtime.rank.member import member_group
from moeserve.runtime.rank.member.member_group import Meeting, MemberGroup, ProcessGroupSettings

MEETING = Meeting("g", 3, 0, 2)
SECONDS = 20.0


def made(monkeypatch: pytest.MonkeyPatch, form: Any, ended: list[object]) -> MemberGroup:
    """The group of rank 0 over gloo, formed by `form`; `ended` hears of the groups that are ended."""
    monkeypatch.setattr(member_group, "form_group", form)
    monkeypatch.setattr(member_group, "end_group", ended.append)
    return MemberGroup(0, ProcessGroupSettings("gloo", SECONDS), lambda message: None)


def test_an_abort_ends_the_wait_for_a_group_whose_backend_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free, ended, began = threading.Event(), list[object](), threading.Event()

    def form(*place: object) -> str:
        began.set()
        assert free.wait(SECONDS)
        return "too late"

    group = made(monkeypatch, form, ended)
    wanted = [True]
    threading.Timer(0.1, wanted.clear).start()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="aborted while its process group formed"):
        group.join(MEETING, "cpu", lambda: bool(wanted))
    assert time.monotonic() - started < SECONDS / 2 and began.is_set()
    group.leave()
    assert ended == []
    monkeypatch.setattr(member_group, "form_group", lambda *place: "next")
    assert group.join(MEETING._replace(generation=5), "cpu", lambda: True) == "next"
    free.set()
    until = time.monotonic() + SECONDS
    while not ended and time.monotonic() < until:
        time.sleep(0.01)
    assert ended == ["too late"], "and the one that serves is left alone"


def test_what_forming_raises_is_raised_where_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def form(*place: object) -> str:
        raise RuntimeError("members stay away")

    with pytest.raises(RuntimeError, match="members stay away"):
        made(monkeypatch, form, []).join(MEETING, "cpu", lambda: True)


def test_the_next_group_does_not_wait_until_the_last_one_has_closed_its_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free, closed = threading.Event(), list[str]()

    class Slow:
        """As gloo's group: its connections are closed when nobody holds it any more."""

        def __del__(self) -> None:
            assert free.wait(SECONDS)
            closed.append(threading.current_thread().name)

    group = made(monkeypatch, lambda *place: Slow(), [])
    monkeypatch.setattr(member_group, "end_group", lambda group: None)
    group.join(MEETING, "cpu", lambda: True)
    group.leave()
    assert not closed
    monkeypatch.setattr(member_group, "form_group", lambda *place: "next")
    assert group.join(MEETING._replace(generation=5), "cpu", lambda: True) == "next"
    free.set()
    for thread in threading.enumerate():
        if thread.name == "closing":
            thread.join(SECONDS)
    assert closed == ["closing"]
