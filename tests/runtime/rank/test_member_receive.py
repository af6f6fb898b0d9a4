"""A rank whose coordinator sends what no rank can take ends and says why: it does not wait for ever."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moeserve.runtime.rank import member as member_module
from moeserve.runtime.rank import member_group as group_module
from moeserve.runtime.rank.lane import Lane
from moeserve.runtime.rank.member import Member
from moeserve.runtime.rank.member_group import ProcessGroupSettings

SECONDS = 5.0


def test_an_entry_that_cannot_be_taken_ends_the_rank() -> None:
    rank: Any = SimpleNamespace(index=3, interrupt=lambda: None, leave=lambda: None)
    lane = Lane(3, 4, 100)
    came: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    wire: Any = SimpleNamespace(receive=came.get, send=lambda message: None)
    member = Member(rank, lane, wire, ProcessGroupSettings("gloo", SECONDS), lambda record: None)
    running = threading.Thread(target=member.run, daemon=True)
    running.start()
    lane.open()
    came.put({"kind": "abort"})  # without its reason
    running.join(SECONDS)
    assert not running.is_alive()
    assert lane.closed is not None


def test_an_abort_ends_the_forming_of_a_group_at_once() -> None:
    progress = SimpleNamespace(join=lambda phase: None)
    rank: Any = SimpleNamespace(index=0, device="cpu", progress=progress)
    rank.interrupt = rank.leave = lambda: None
    came: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    wire: Any = SimpleNamespace(receive=came.get, send=said.put)
    member = Member(rank, None, wire, ProcessGroupSettings("gloo", 60.0), lambda record: None)
    member._epoch = cast(Any, "an epoch that was prepared")
    member._generation = 4
    left = threading.Event()
    member.on_serving = lambda generation, epoch: left.set()
    running = threading.Thread(target=member.run, daemon=True)
    running.start()
    came.put({"kind": "join", "generation": 4, "group": "g", "position": 0, "size": 2})
    for what in ("set", "wait"):  # for its peer, which never comes
        asked = said.get(timeout=SECONDS)
        assert (asked["kind"], asked["generation"], asked["what"]) == ("store", 4, what)
        if what == "set":
            came.put({"kind": "stored", "generation": 4, "call": asked["call"], "value": None})
    came.put({"kind": "abort", "generation": 4, "reason": "rank 1 is lost", "back": False})
    assert left.wait(SECONDS)
    came.put({"kind": "stop"})
    running.join(SECONDS)
    assert not running.is_alive() and said.empty()


def test_a_group_that_takes_long_to_abort_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's abort was seen to wait until its group is destroyed, which the abort's entry has done."""
    destroyed, reached = threading.Event(), SimpleNamespace()
    monkeypatch.setattr(group_module, "abort_group", lambda group: destroyed.wait(60.0))
    monkeypatch.setattr(group_module, "end_group", lambda group: destroyed.set())
    monkeypatch.setattr(member_module, "here_message", lambda generation, found: {"kind": "here"})
    rank: Any = SimpleNamespace(index=0, progress=SimpleNamespace(reached=reached))
    rank.interrupt = rank.leave = lambda: None
    came: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    wire: Any = SimpleNamespace(receive=came.get, send=said.put)
    member = Member(rank, None, wire, ProcessGroupSettings("nccl", 60.0), lambda record: None)
    member._generation, member._group._formed = 4, cast(Any, "a group")
    running = threading.Thread(target=member.run, daemon=True)
    running.start()
    came.put({"kind": "abort", "generation": 4, "reason": "rank 1 is lost", "back": False})
    came.put({"kind": "ask", "generation": 5})
    assert said.get(timeout=SECONDS) == {"kind": "here"}
    assert destroyed.wait(SECONDS)
    came.put({"kind": "stop"})
    running.join(SECONDS)
    assert not running.is_alive()
