"""Rows that a request claims and does not bring take no room from those that are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_targets import Door

from moeserve.proto import moe_pb2
from moeserve.runtime.doors.calls.rows import Leave, RowAdmission, RowLimits
from moeserve.runtime.errors import LaneFull

CLAIMED = 8 * 64 - 1  # nearly as many as the lane ever takes


class Counting(RowAdmission):
    """Notes what it lets in; `full`: nothing is."""

    def __init__(self) -> None:
        super().__init__(RowLimits())
        self.entered: list[int] = []
        self.full = False

    def enter(self, peer: str, rows: int, deadline: float) -> Leave:
        self.entered.append(rows)
        if self.full:
            raise LaneFull("so it is", 0.1)
        return super().enter(peer, rows, deadline)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    made = Door(tmp_path)
    made.door.admission = Counting()
    yield made
    made.check_nothing_held()
    assert not made.door.admission.rows
    made.close()


def begun(door: Door, request: moe_pb2.ForwardRequest) -> tuple[str, list[int]]:
    """The reason of its refusal, and the rows that were let in for it."""
    replies = list[moe_pb2.ForwardStreamReply]()
    assert door.door.begin(request, replies.append, "ipv4:10.0.0.1:1") is None
    assert isinstance(door.door.admission, Counting)
    return replies[0].error.reason, door.door.admission.entered


@pytest.mark.parametrize("lie", ["no data", "a small region", "no such region", "narrow rows"])
def test_rows_that_are_not_there_are_not_let_in(door: Door, lie: str) -> None:
    request = moe_pb2.ForwardRequest.FromString(door.seeds[0])
    width, reason = request.hidden.shape[1], "bad_tensor"
    request.hidden.shape[0] = CLAIMED
    match lie:
        case "no data":
            request.hidden.data = b""
        case "a small region":
            name, _ = door.regions.create(1)
            request.hidden.region.CopyFrom(moe_pb2.Region(name=name, size=CLAIMED * width * 4))
        case "no such region":
            reason = "unknown_region"
            request.hidden.region.CopyFrom(moe_pb2.Region(name="region-9", size=CLAIMED * width * 4))
        case "narrow rows":
            request.hidden.shape[1], request.hidden.data = 1, bytes(CLAIMED * 4)
    assert begun(door, request) == (reason, [])


def test_rows_that_are_there_are_let_in_before_anything_is_computed_of_them(door: Door) -> None:
    request = moe_pb2.ForwardRequest.FromString(door.seeds[1])
    assert request.WhichOneof("route") == "logits"
    assert isinstance(door.door.admission, Counting)
    door.door.admission.full = True
    door.reader._gate = None  # type: ignore[assignment]  # nobody chooses experts
    assert begun(door, request) == ("overloaded", [3])


def test_a_call_that_is_refused_is_counted_by_how_its_rows_come(door: Door) -> None:
    observed = list[tuple[str, str, str]]()
    door.door._observe = lambda *told: observed.append(told[:3])  # type: ignore[assignment]
    request = moe_pb2.ForwardRequest.FromString(door.seeds[-1])  # its rows lie in a region
    assert isinstance(door.door.admission, Counting)
    door.door.admission.full = True
    request.output.offset = request.output.size
    for method in ("RegionCall", "DataConnection"):
        assert door.door.begin(request, lambda reply: None, "unix:", method) is None
    code = "RESOURCE_EXHAUSTED"
    assert observed == [("RegionCall", "shared_memory", code), ("DataConnection", "inline", code)]
