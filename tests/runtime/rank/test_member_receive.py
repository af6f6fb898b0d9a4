"""A rank whose coordinator sends what no rank can take ends and says why: it does not wait for ever."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from moeserve.runtime.control.messages import epoch_message, held_from
from moeserve.runtime.control.reached import Phase, Reached
from moeserve.runtime.control.stream import StreamClosed
from moeserve.runtime.epoch import Epoch
from moeserve.runtime.mesh import Mesh
from moeserve.runtime.rank.lanes.lane import Lane
from moeserve.runtime.rank.lanes.lane_call import LaneBatch
from moeserve.runtime.rank.member import member as member_module
from moeserve.runtime.rank.member import member_group as group_module
from moeserve.runtime.rank.member.member import Member
from moeserve.runtime.rank.member.member_group import ProcessGroupSettings

SECONDS = 5.0

Messages = queue.SimpleQueue[dict[str, Any]]


def of_rank(rank: Any, settings: ProcessGroupSettings) -> tuple[Member, Messages, Messages]:
    """A member without a lane; what comes to it from the head, and what it says."""
    came, said = Messages(), Messages()
    wire: Any = SimpleNamespace(receive=came.get, send=said.put)
    return Member(rank, None, wire, settings, lambda record: None), came, said


def without_a_lane(index: int) -> tuple[Member, Messages, Messages]:
    """As `of_rank`, of a rank that does nothing where its group ends."""
    rank: Any = SimpleNamespace(index=index, interrupt=lambda: None)
    rank.leave, rank.free = lambda keep: None, lambda: None
    return of_rank(rank, ProcessGroupSettings("gloo", SECONDS))


def test_an_entry_that_cannot_be_taken_ends_the_rank() -> None:
    rank: Any = SimpleNamespace(index=3, interrupt=lambda: None, leave=lambda keep: None, free=lambda: None)
    lane = Lane(3, 4, 100)
    came = Messages()
    wire: Any = SimpleNamespace(receive=came.get, send=lambda message: None)
    member = Member(rank, lane, wire, ProcessGroupSettings("gloo", SECONDS), lambda record: None)
    running = threading.Thread(target=member.run, daemon=True)
    running.start()
    lane.open()
    came.put({"kind": "abort"})  # without its reason
    running.join(SECONDS)
    assert not running.is_alive()
    assert lane.closed is not None


def test_nothing_of_a_generation_is_executed_after_an_entry_that_failed() -> None:
    """Others may still be in that step: gloo ends the process that gets the next one's rows in it."""
    member, came, said = without_a_lane(0)
    executed: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def execute(entry: dict[str, Any]) -> None:
        executed.put((entry["generation"], entry["number"]))
        if entry["number"] == 1:
            raise RuntimeError("Connection reset by peer")

    member._execute = execute  # type: ignore[method-assign]
    member._generation.announced(4)
    running = threading.Thread(target=member.run, daemon=True)
    running.start()
    for number in range(4):
        came.put({"kind": "step", "generation": 4, "number": number})
    assert (failed := said.get(timeout=SECONDS))["kind"] == "failed" and failed["generation"] == 4
    came.put({"kind": "abort", "generation": 4, "reason": "rank 1 is lost", "back": True, "number": 9})
    came.put({"kind": "stop"})
    running.join(SECONDS)
    assert [executed.get(timeout=SECONDS) for _ in range(3)] == [(4, 0), (4, 1), (4, 9)]
    assert executed.empty() and said.empty()


def test_an_abort_ends_the_forming_of_a_group_at_once() -> None:
    progress = SimpleNamespace(join=lambda phase: None)
    rank: Any = SimpleNamespace(index=0, device="cpu", progress=progress)
    rank.interrupt, rank.leave, rank.free = lambda: None, lambda keep: None, lambda: None
    member, came, said = of_rank(rank, ProcessGroupSettings("gloo", 60.0))
    member._held.epoch = cast(Any, "an epoch that was prepared")
    member._generation.announced(4)
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
    rank.interrupt, rank.leave, rank.free = lambda: None, lambda keep: None, lambda: None
    member, came, said = of_rank(rank, ProcessGroupSettings("nccl", 60.0))
    member._generation.announced(4)
    member._generation._group._formed = cast(Any, "a group")
    running = threading.Thread(target=member.run, daemon=True)
    running.start()
    came.put({"kind": "abort", "generation": 4, "reason": "rank 1 is lost", "back": False})
    came.put({"kind": "ask", "generation": 5})
    assert said.get(timeout=SECONDS) == {"kind": "here"}
    assert destroyed.wait(SECONDS)
    came.put({"kind": "stop"})
    running.join(SECONDS)
    assert not running.is_alive()


class Gone:
    """The end of a head's stream, among what comes."""


def coming_back(times: int) -> tuple[Member, queue.SimpleQueue[Any], Messages]:
    """A member that holds experts and finds its head again so often; what comes to it, and what it says."""
    came: queue.SimpleQueue[Any] = queue.SimpleQueue()
    said = Messages()

    def receive() -> dict[str, Any]:
        if isinstance(found := came.get(), Gone):
            raise StreamClosed("the other end closed the stream")
        return cast(dict[str, Any], found)

    experts = SimpleNamespace(use_weights=lambda paths: None, bytes_read=9, bank=SimpleNamespace(nbytes=9))
    progress = SimpleNamespace(join=lambda phase: None, reached=Reached(0, Phase.PREPARED))
    rank: Any = SimpleNamespace(
        index=0, loaded=True, take=lambda epoch: (), experts=experts, progress=progress
    )
    rank.interrupt, rank.leave, rank.free = lambda: None, lambda keep: None, lambda: None
    wire: Any = SimpleNamespace(receive=receive, send=said.put)
    member = Member(rank, Lane(0, 4, 100), wire, ProcessGroupSettings("gloo", SECONDS), lambda record: None)
    found = iter([True] * times + [False])
    member.come_back = lambda: next(found)
    return member, came, said


def prepared(generation: int, epoch: Epoch) -> dict[str, Any]:
    return {"kind": "prepare", "generation": generation, "epoch": epoch_message(epoch), "after": True}


def until_said(said: Messages, kind: str) -> dict[str, Any]:
    while (found := said.get(timeout=SECONDS))["kind"] != kind:
        pass
    return found


def test_a_member_that_comes_back_says_what_its_group_adopted() -> None:
    first = Epoch.first(Mesh(1, 1, 1), layers=1, experts=4)
    moved = first.moved(0, np.array([1, 0, 2, 3], dtype=np.int32))
    member, came, said = coming_back(2)
    running = threading.Thread(target=member.run, daemon=True)
    running.start()
    came.put(Gone())
    assert held_from(until_said(said, "held")) == (0, None), "it has been in no group yet"
    came.put(prepared(7, moved))
    until_said(said, "prepared")
    came.put(Gone())
    assert held_from(until_said(said, "held")) == (7, moved)
    came.put({"kind": "stop"})
    came.put(Gone())
    running.join(SECONDS)
    assert not running.is_alive(), "it was told to stop, and does not come back"


def test_a_member_whose_head_does_not_come_back_stops() -> None:
    member, came, _ = coming_back(0)
    running = threading.Thread(target=member.run, daemon=True)
    running.start()
    came.put(Gone())
    running.join(SECONDS)
    assert not running.is_alive()


def test_jobs_stay_in_the_lane_while_the_head_is_away() -> None:
    member, came, said = coming_back(1)
    lane = member._lane
    assert lane is not None
    lane.announce = member.announce
    running = threading.Thread(target=member.run, daemon=True)
    running.start()
    lane.open(7)
    one = torch.zeros(1, 1)
    call = lane.submit(LaneBatch(0, one, torch.zeros(1, 1, dtype=torch.int32), one))
    assert until_said(said, "announce")["generation"] == 7
    came.put(Gone())
    until_said(said, "held")
    assert not call.ended and lane.in_flight == 1
    lane.open(9)
    assert until_said(said, "announce")["generation"] == 9
    came.put({"kind": "stop"})
    came.put(Gone())
    running.join(SECONDS)
    assert call.ended


def test_a_member_that_cannot_load_beforehand_says_so_whatever_it_was_before() -> None:
    member, came, said = without_a_lane(2)
    running = threading.Thread(target=member.run, daemon=True)
    running.start()
    came.put({"kind": "abort", "generation": 4, "reason": "the stream broke", "back": True})
    came.put({"kind": "load", "generation": 0, "epoch": {}})
    failed = said.get(timeout=SECONDS)
    assert failed["kind"] == "failed" and "rank 2: 'load' failed" in failed["reason"]
    came.put({"kind": "stop"})
    running.join(SECONDS)
    assert not running.is_alive()


def test_a_process_that_reads_experts_tells_the_next_head_at_once_and_loads_for_that_one() -> None:
    """A group that comes together again does not wait for it."""
    first = Epoch.first(Mesh(1, 1, 1), layers=1, experts=4)
    member, came, said = coming_back(1)
    reading, go_on, loads = threading.Event(), threading.Event(), list[Epoch]()

    def load(epoch: Epoch, progress: Any) -> None:
        loads.append(epoch)
        reading.set()
        assert go_on.wait(SECONDS)

    cast(Any, member._rank).load = load
    cast(Any, member._rank).served = SimpleNamespace(layers=(0,))
    running = threading.Thread(target=member.run, daemon=True)
    running.start()
    came.put({"kind": "load", "generation": 0, "epoch": epoch_message(first)})
    assert reading.wait(SECONDS)
    came.put(Gone())
    assert held_from(until_said(said, "held")) == (0, None), "it still reads"
    second = first.moved(0, np.array([1, 0, 2, 3], dtype=np.int32))
    came.put({"kind": "load", "generation": 0, "epoch": epoch_message(second)})
    go_on.set()
    until_said(said, "loaded")
    assert loads == [first, second] and member._held.epoch == second, (
        "what the first head asked for is not told"
    )
    came.put({"kind": "stop"})
    came.put(Gone())
    running.join(SECONDS)
    assert said.empty()
