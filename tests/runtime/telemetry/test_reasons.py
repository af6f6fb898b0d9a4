"""Whoever is refused, fenced, backed off or superseded is one line of the log with the reason."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from fake_members import SECONDS, FakeMember, head_of, serving, until

from moeserve.dispatch.members import Members
from moeserve.proto import moe_pb2, moe_pb2_grpc
from moeserve.proto.transports.shared_memory import socket_address
from moeserve.runtime.doors.calls.admission import DoorLimits
from moeserve.runtime.doors.endpoint import Endpoint
from moeserve.runtime.doors.failures import status_of
from moeserve.runtime.doors.lane_door import NOT_THE_FRONT_DOOR
from moeserve.runtime.doors.payloads import RegionLimits, Regions, handover
from moeserve.runtime.errors import LaneFull
from moeserve.runtime.head.coordinator import Coordinator
from moeserve.runtime.head.generations import blame, rendezvous

MEMBERS = Members.of_ranks(2)

Said = Callable[[str], None]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    """Waits for a line."""
    caplog.set_level(logging.INFO, "moeserve")

    def comes(text: str) -> None:
        until(lambda: text in caplog.text)

    return comes


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    monkeypatch.setattr(rendezvous, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr(blame, "BLAME_SECONDS", 0.5)  # in which members that run have said so
    with head_of() as made:
        yield made


def test_the_head_says_what_becomes_of_the_group(coordinator: Coordinator, said: Said) -> None:
    members = serving(coordinator, MEMBERS)
    for state in (
        "preparing: generation 1 is loading experts",
        "joining: generation 1 is joining",
        "serving",
    ):
        said(f"the group is {state}")
    members[1].say("failed", reason="rank 1: a step failed")
    said("generation 1 aborts: rank 1: a step failed")
    said("the group is forming: rank 1: a step failed")


def test_who_speaks_of_a_generation_before_is_fenced_with_a_line(
    coordinator: Coordinator, said: Said
) -> None:
    members = serving(coordinator, MEMBERS)
    members[0].stream.send({"kind": "done", "generation": 0, "step": 1})
    said("rank 0 spoke of generation 0, and it is 1: that does not count")


LONG = {"kind": "x" * 70_000}, {"kind": "announce", "job": 1, "layer": 0, "rows": 1, "left": "x" * 70_000}


@pytest.mark.parametrize("said", LONG, ids=("kind", "left"))
def test_the_reason_repeats_what_a_member_said_only_so_far(
    coordinator: Coordinator, said: dict[str, str]
) -> None:
    members = serving(coordinator, MEMBERS)
    members[0].say(**said)
    members[1].entry("abort")
    reason = coordinator.progress().reason
    assert "malformed" in reason and len(reason) < 1200


def test_a_reason_not_to_start_is_cut(coordinator: Coordinator) -> None:
    FakeMember(coordinator, 0, refused="x" * 70_000, for_good=True)
    until(lambda: coordinator.progress().state == "failed")
    assert len(coordinator.progress().reason) <= 1024


def test_who_is_superseded_is_a_line(coordinator: Coordinator, said: Said) -> None:
    serving(coordinator, MEMBERS)
    FakeMember(coordinator, 1, pid=999)
    said("rank 1 (pid 101) is given up: pid 999 has taken its place")


def test_a_generation_that_waits_for_a_process_to_end_says_for_which(
    coordinator: Coordinator, said: Said
) -> None:
    coordinator.generations.parted.is_gone = lambda process: False
    serving(coordinator, MEMBERS)
    FakeMember(coordinator, 1, pid=999)
    said("no generation forms before processes [101], given up, have ended")


def test_who_backs_off_and_who_drains_is_a_line(coordinator: Coordinator, said: Said) -> None:
    members = [FakeMember(coordinator, seat) for seat in (0, 1)]
    for one in members:
        one.entry("prepare")
    members[0].say("failed", reason="rank 0: prepare failed: no memory")
    said("the next generation is tried in 0.")
    for one in members:
        one.stream.close()
    until(lambda: not coordinator.seats())
    serving(coordinator, MEMBERS)
    assert not coordinator.stopping.drain(0.05)
    said("lanes take no further call, and have 0.0")  # 0.05 s, or what a busy machine has left of them
    said(" s for those under way: the service is stopping")


def test_a_refused_call_is_a_line_of_its_reason(said: Said) -> None:
    status_of(LaneFull("256 calls are under way", 0.1))
    said("a call ends with RESOURCE_EXHAUSTED (overloaded): 256 calls are under way")


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A lane's endpoint that answers CreateRegion by refusing; calls have to arrive within a second."""

    class Lane(moe_pb2_grpc.LaneServiceServicer):
        def CreateRegion(self, request: object, context: grpc.ServicerContext) -> object:
            return status_of(LaneFull("no room", 0.1)).abort(context)

    limits = DoorLimits(request_seconds=1.0, unread_seconds=1.0)
    made = Endpoint({"LaneService": Lane()}, NOT_THE_FRONT_DOOR, limits, 1 << 20)
    try:
        yield made.start("127.0.0.1", 0)
    finally:
        made.stop(0.0)


def test_a_call_at_the_wrong_door_is_a_line(endpoint: str, said: Said) -> None:
    with grpc.insecure_channel(endpoint) as channel, pytest.raises(grpc.RpcError):
        moe_pb2_grpc.FrontServiceStub(channel).GetModel(moe_pb2.GetModelRequest(), timeout=SECONDS)
    said("a call ends with FAILED_PRECONDITION (not_the_front_door): a lane runs experts")


def test_who_begins_a_call_and_sends_nothing_is_a_line(endpoint: str, said: Said) -> None:
    with grpc.insecure_channel(endpoint) as channel:
        method = "/moeserve.v1.LaneService/CreateRegion"
        call = channel.stream_unary(method).future(_silence())
        said("a caller is left, 'ipv4:127.0.0.1:")
        said(": it sends no message")
        call.cancel()


def _silence() -> Iterator[bytes]:
    time.sleep(2.0)
    yield from ()


def test_who_asks_for_a_region_in_vain_or_not_at_all_is_a_line(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "TICK_SECONDS", 0.05)
    regions = Regions(RegionLimits(fetch_seconds=0.1))
    try:
        for name in (b"", b"region-7"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.connect(socket_address(regions.socket))
                if name:
                    client.send(name)
                said(
                    "was refused a region: no region has this name"
                    if name
                    else "named no region within 0.1 s"
                )
    finally:
        regions.close()
