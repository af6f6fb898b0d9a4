"""A rank whose coordinator sends what no rank can take ends and says why: it does not wait for ever."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

from moeserve.runtime.rank.lane import Lane
from moeserve.runtime.rank.member import Member, ProcessGroupSettings

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
