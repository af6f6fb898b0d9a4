"""Calls over a region's lease: answered, refused, timed out and given up, without gRPC."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from struck import Stop, struck

from moeserve.proto import moe_pb2
from moeserve.proto.errors import DeadlineExceeded, InvalidArgument, Unavailable
from moeserve.proto.transports.region_calls import PACKET_BYTES, RegionCalls
from moeserve.proto.transports.shared_memory import RemoteRegion
from moeserve.runtime.doors.payloads import Regions

Answer = Callable[[bytes], None]


class Lane:
    """Takes calls over leases: keeps what came, and answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[moe_pb2.ForwardRequest] = []
        self.answers: list[Answer] = []
        self.left: list[str] = []
        self.came = threading.Semaphore(0)

    def take_call(self, packet: bytes, answer: Answer, peer: str) -> Callable[[], None]:
        """What a door does, without a rank."""
        request = moe_pb2.ForwardRequest.FromString(packet)
        self.asked.append(request)
        self.answers.append(answer)
        self.came.release()
        return lambda: self.left.append(request.job_id)

    def reply(self, at: int, **fields: object) -> None:
        """Answers the call number `at`."""
        assert self.came.acquire(timeout=5)
        reply = moe_pb2.ForwardStreamReply(job_id=self.asked[at].job_id, **fields)
        self.answers[at](reply.SerializeToString())


@pytest.fixture
def lane() -> Lane:
    return Lane()


@pytest.fixture
def regions(lane: Lane) -> Iterator[Regions]:
    made = Regions()
    made.take_call = lane.take_call
    yield made
    made.close()


def fetched(regions: Regions) -> RemoteRegion:
    """A region as a client has it."""
    name, size = regions.create(4096)
    return RemoteRegion.open(moe_pb2.CreateRegionReply(name=name, size=size, socket=regions.socket))


@pytest.fixture
def region(regions: Regions) -> RemoteRegion:
    return fetched(regions)


@pytest.fixture
def calls(region: RemoteRegion) -> RegionCalls:
    assert region.calls is not None
    return region.calls


def job(name: str, **fields: object) -> moe_pb2.ForwardRequest:
    return moe_pb2.ForwardRequest(job_id=name, **fields)  # type: ignore[arg-type]


def test_a_call_is_answered(calls: RegionCalls, lane: Lane, region: RemoteRegion) -> None:
    for at in range(3):
        assert calls.send(job(f"job-{at}", layer=at), 5.0)
        lane.reply(at, reply=moe_pb2.ForwardReply(epoch=at + 1))
        assert calls.receive(f"job-{at}").epoch == at + 1
    assert [(asked.job_id, asked.layer) for asked in lane.asked] == [("job-0", 0), ("job-1", 1), ("job-2", 2)]
    assert lane.asked[0].timeout_ms == 5000
    assert region.alive


def test_an_error_is_raised(calls: RegionCalls, lane: Lane) -> None:
    assert calls.send(job("a"), 5.0)
    lane.reply(0, error=moe_pb2.Error(code=3, reason="bad_tensor", message="hidden: no"))
    with pytest.raises(InvalidArgument, match=r"INVALID_ARGUMENT \(bad_tensor\): hidden: no"):
        calls.receive("a")
    assert calls.send(job("b"), 5.0)  # and the lease is free again
    calls.leave("b")


def test_one_call_at_a_time(calls: RegionCalls) -> None:
    assert calls.send(job("a"), 5.0)
    assert not calls.send(job("b"), 5.0)
    calls.leave("a")
    assert calls.send(job("c"), 5.0)
    calls.leave("c")


def test_a_call_that_was_interrupted_leaves_the_next_one_its_lease(calls: RegionCalls) -> None:
    assert calls.send(job("a"), 5.0)
    with struck(Stop), pytest.raises(Stop):
        calls.receive("a")
    calls.leave("a")  # as who gives up what it waited for does
    assert calls.send(job("b"), 5.0)
    calls.leave("a")
    assert not calls.send(job("c"), 5.0)
    calls.leave("b")


def test_a_request_that_is_too_long_is_not_taken(calls: RegionCalls, lane: Lane) -> None:
    assert not calls.send(job("a" * PACKET_BYTES), 5.0)
    assert calls.send(job("b"), 5.0)
    lane.reply(0)
    assert lane.asked[0].job_id == "b"


def test_a_call_that_is_not_answered_in_time(calls: RegionCalls, lane: Lane) -> None:
    started = time.monotonic()
    assert calls.send(job("a"), 0.05)
    with pytest.raises(DeadlineExceeded, match=r"the lane did not answer within 0\.\d+ s"):
        calls.receive("a")
    assert 0.05 <= time.monotonic() - started < 3

    assert calls.send(job("b"), 5.0)
    lane.reply(0, reply=moe_pb2.ForwardReply(epoch=1))  # late, to the call that gave up
    lane.reply(1, reply=moe_pb2.ForwardReply(epoch=2))
    assert calls.receive("b").epoch == 2


def test_closing_the_region_gives_its_call_up(calls: RegionCalls, lane: Lane, region: RemoteRegion) -> None:
    assert calls.send(job("a"), 5.0)
    assert lane.came.acquire(timeout=5)
    region.close()
    deadline = time.monotonic() + 5
    while not lane.left and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lane.left == ["a"]
    lane.answers[0](b"too late")  # the connection is gone; nobody is hurt


def test_a_lane_that_stops_ends_the_call(calls: RegionCalls, lane: Lane, regions: Regions) -> None:
    assert calls.send(job("a"), 5.0)
    assert lane.came.acquire(timeout=5)
    regions.close()
    with pytest.raises(Unavailable, match="the lane's process is gone or stopping"):
        calls.receive("a")
    with pytest.raises(Unavailable):
        calls.send(job("b"), 5.0)


def test_a_lane_that_takes_no_such_calls_offers_none() -> None:
    plain = Regions()
    try:
        region = fetched(plain)
        assert region.calls is None
        assert region.alive
    finally:
        plain.close()


@pytest.mark.parametrize("seconds", [3e6, 5e6, 1e10, math.inf])
def test_any_timeout_is_taken(calls: RegionCalls, lane: Lane, seconds: float) -> None:
    assert calls.send(job("a"), seconds)
    lane.reply(0, reply=moe_pb2.ForwardReply(epoch=1))
    assert calls.receive("a").epoch == 1
