"""The front door's way to the lanes: parts and their answers, connections that end with their lane."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import torch
from proto_fake import FAR, FakeLane, rows

from moeserve.proto import moe_pb2
from moeserve.proto.client import sync_link
from moeserve.proto.errors import REASON_KEY, InvalidArgument, MoeError, Unavailable, WeightsChanged
from moeserve.proto.tensors import encode, plain
from moeserve.runtime.doors import forwarding
from moeserve.runtime.errors import CallerLeft, DeadlinePassed

SECONDS = 10.0


class Context:
    """As much of a gRPC context as a caller needs."""

    def __init__(self, *, over: bool = False, remaining: float | None = None) -> None:
        self.leave: Callable[[], None] = lambda: None
        self._over = over
        self._remaining = remaining

    def add_callback(self, act: Callable[[], None]) -> bool:
        self.leave = act
        return not self._over

    def time_remaining(self) -> float | None:
        return self._remaining


class Front:
    """Forwarding over fake lanes, and every link that it made."""

    def __init__(self, lanes: list[FakeLane], links: list[sync_link.Link]) -> None:
        self.lanes = lanes
        self.links = links
        self.reason = ""
        self.held = threading.Event()  # a lane with this in its script answers when the test is over
        self.forwarding = forwarding.Forwarding(self._topology)

    def _topology(self) -> moe_pb2.GetTopologyReply:
        lanes = [lane.lane(FAR) for lane in self.lanes]
        return moe_pb2.GetTopologyReply(lanes=lanes, serving=not self.reason, reason=self.reason)

    def forward(
        self, count: int, *, timeout: float | None = 20.0, caller: Context | None = None
    ) -> moe_pb2.ForwardReply:
        hidden, experts, weights = rows(count)
        choice = moe_pb2.Choice(ids=encode(plain(experts, "x")), weights=encode(plain(weights, "x")))
        request = moe_pb2.ForwardRequest(layer=3, job_id="job", attempt=2, weights_version=1, choice=choice)
        request.hidden.CopyFrom(encode(plain(hidden, "x")))
        made: Any = caller or Context()
        return self.forwarding.forward(request, timeout, forwarding.Caller(made))

    def until_asked(self, *lanes: FakeLane) -> None:
        """Waits until each of these lanes has a request."""
        until = time.monotonic() + SECONDS
        while not all(lane.asked for lane in lanes):
            assert time.monotonic() < until, "a lane was not asked"
            time.sleep(0.005)

    def open(self) -> list[str]:
        """Addresses to which there is a channel."""
        return [link.address for link in self.links if not link.closed]


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    links: list[sync_link.Link] = []

    class Counted(sync_link.Link):
        def __init__(self, address: str, max_message_bytes: int, credentials: None) -> None:
            super().__init__(address, max_message_bytes, credentials)
            links.append(self)

    monkeypatch.setattr(forwarding, "Link", Counted)
    made = Front([FakeLane(0), FakeLane(1)], links)
    yield made
    made.held.set()
    made.forwarding.close()
    for lane in made.lanes:
        lane.stop()


def _hidden(reply: moe_pb2.ForwardReply) -> torch.Tensor:
    return torch.frombuffer(bytearray(reply.hidden.data), dtype=torch.float32).view(*reply.hidden.shape)


@pytest.mark.parametrize(
    ("count", "asked"), [(1, [1]), (1023, [1023]), (1024, [512, 512]), (3201, [1600, 1601])]
)
def test_large_batches_are_shared_by_lanes(front: Front, count: int, asked: list[int]) -> None:
    reply = front.forward(count)
    assert torch.equal(_hidden(reply), rows(count)[0] * 2)
    requests = [request for lane in front.lanes for request in lane.asked]
    assert sorted(request.hidden.shape[0] for request in requests) == asked
    assert {(r.layer, r.weights_version, r.WhichOneof("route")) for r in requests} == {(3, 1, "choice")}
    assert reply.epoch == 7 and reply.weights_version == 1  # of the older epoch


def test_small_batches_go_to_one_lane_one_after_another_and_to_others_at_the_same_time(front: Front) -> None:
    for _ in range(3):
        front.forward(2)
    assert [len(lane.asked) for lane in front.lanes] == [3, 0]
    front.lanes[0].asked.clear()
    front.lanes[0].scripts = [front.held]
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(front.forward, 2)
        front.until_asked(front.lanes[0])
        for _ in range(3):
            front.forward(2)
        assert [len(lane.asked) for lane in front.lanes] == [1, 3]
        front.held.set()
        under_way.result(SECONDS)


def test_parts_that_saw_different_weights_are_no_answer(front: Front) -> None:
    front.lanes[0].versions, front.lanes[1].versions = [1], [2]
    with pytest.raises(WeightsChanged, match=r"layer 3 saw weights versions \[1, 2\]"):
        front.forward(1600)


def test_what_a_lane_refuses_of_a_part_it_is_asked_for_whole(front: Front) -> None:
    front.lanes[1].scripts = [(grpc.StatusCode.INVALID_ARGUMENT, {REASON_KEY: "bad_tensor"})] * 2
    front.lanes[0].scripts = [0.0, (grpc.StatusCode.INVALID_ARGUMENT, {REASON_KEY: "bad_tensor"})]
    with pytest.raises(InvalidArgument):
        front.forward(1600)
    whole = [r for lane in front.lanes for r in lane.asked if r.hidden.shape[0] == 1600]
    assert [(request.job_id, request.attempt) for request in whole] == [("job", 2)]


def test_a_group_that_does_not_serve_is_unavailable(front: Front) -> None:
    front.reason = "rank 1 was lost"
    with pytest.raises(Unavailable, match="rank 1 was lost"):
        front.forward(1)


def test_a_lane_that_refuses_does_not_draw_calls(front: Front) -> None:
    """It refuses at once, and so has the fewest calls under way."""
    front.lanes[0].scripts = [(grpc.StatusCode.RESOURCE_EXHAUSTED, {REASON_KEY: "lane_full"})] * 200
    front.lanes[1].scripts = [0.01] * 200
    failed = list[MoeError]()

    def call(_: int) -> None:
        try:
            front.forward(2)
        except MoeError as refused:
            failed.append(refused)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(100)))
    assert len(failed) == len(front.lanes[0].asked) < 20
    count = len(front.lanes[1].asked)
    front.lanes[1].scripts = [(grpc.StatusCode.INVALID_ARGUMENT, {REASON_KEY: "bad_tensor"})]
    with pytest.raises(InvalidArgument):
        front.forward(2)
    front.forward(2)
    assert len(front.lanes[1].asked) == count + 2, "what the caller did wrong tells nothing of a lane"


def test_no_lane_is_asked_that_is_to_leave(front: Front) -> None:
    first, second = (lane.lane(FAR).rank for lane in front.lanes)
    front.forwarding.leaving = lambda: (first,)
    for _ in range(3):
        front.forward(2)
    assert [len(lane.asked) for lane in front.lanes] == [0, 3]
    front.forwarding.leaving = lambda: (first, second)
    with pytest.raises(Unavailable, match="no lane takes calls now"):
        front.forward(2)


def test_channels_to_lanes_that_restarted_elsewhere_are_closed(front: Front) -> None:
    front.forward(1600)
    before = [lane.address for lane in front.lanes]
    assert sorted(front.open()) == sorted(before)
    for _ in range(3):
        front.lanes[1].stop()
        front.lanes[1] = FakeLane(1)
        front.forward(1600)
        assert sorted(front.open()) == sorted(lane.address for lane in front.lanes)
    assert len(front.links) == 5  # the lane that stayed keeps its own


def test_a_call_on_a_channel_that_is_closed_meanwhile_is_unavailable(front: Front) -> None:
    """Not cancelled: its caller did nothing, and may ask again."""
    gone = front.lanes[0]
    gone.scripts = [front.held]
    with ThreadPoolExecutor(1) as pool:
        doomed = pool.submit(front.forward, 2)
        front.until_asked(gone)
        front.lanes[0] = FakeLane(0)
        front.forward(2)
        with pytest.raises(Unavailable, match="left the group"):
            doomed.result(SECONDS)
        front.held.set()
    gone.stop()


def test_a_lane_that_dies_under_a_call_is_told_with_a_reason(front: Front) -> None:
    """Not with gRPC's words alone, which give a program nothing to go by."""
    dies = front.lanes[0]
    dies.scripts = [front.held]
    with ThreadPoolExecutor(1) as pool, pytest.raises(Unavailable, match="layer 3: a lane is gone") as failed:
        pool.submit(lambda: (front.until_asked(dies), dies.stop()))
        front.forward(2)
    assert failed.value.reason == "not_serving"


def test_the_caller_s_deadline_is_told_as_such(front: Front) -> None:
    front.lanes[0].scripts = [front.held]
    with pytest.raises(DeadlinePassed, match="layer 3: no answer within the deadline"):
        front.forward(2, timeout=0.2)


def test_a_caller_that_leaves_ends_its_calls(front: Front) -> None:
    for lane in front.lanes:
        lane.scripts = [front.held]
    context = Context()
    with ThreadPoolExecutor(1) as pool, pytest.raises(CallerLeft):
        pool.submit(lambda: (front.until_asked(*front.lanes), context.leave()))
        front.forward(1600, caller=context)
    assert not front.held.is_set(), "no lane has answered"


def test_a_caller_that_has_left_already_is_not_waited_for(front: Front) -> None:
    with pytest.raises(CallerLeft):
        front.forward(1600, caller=Context(over=True))
    with pytest.raises(DeadlinePassed):
        front.forward(1, caller=Context(over=True, remaining=0.0))


def test_a_caller_that_leaves_at_its_deadline_is_late_though_the_clock_here_is_not(front: Front) -> None:
    """Its own clock began earlier, and gRPC rounds up: 20 ms were left here."""
    for left, why in ((0.02, DeadlinePassed), (4.0, CallerLeft)):
        front.lanes[0].scripts = [front.held]
        context = Context(remaining=5.0)

        def leave(context: Context = context, left: float = left) -> None:
            front.until_asked(front.lanes[0])
            context._remaining = left
            context.leave()

        with ThreadPoolExecutor(1) as pool, pytest.raises(why):
            pool.submit(leave)
            front.forward(2, caller=context)
        front.lanes[0].asked.clear()


def test_no_lane_is_asked_for_a_caller_that_has_left(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that answers before its call is cancelled would be an answer to nobody."""
    forward = sync_link.Link.forward

    def answered(link: sync_link.Link, *asked: Any) -> sync_link.Sent:
        sent = forward(link, *asked)
        reply = sent.wait()
        return sync_link.Sent(lambda: reply, lambda: None)

    monkeypatch.setattr(sync_link.Link, "forward", answered)
    for count in (2, 1600):
        with pytest.raises(CallerLeft):
            front.forward(count, caller=Context(over=True))
    assert not any(lane.asked for lane in front.lanes)


def test_closing_it_closes_every_channel(front: Front) -> None:
    front.forward(1600)
    front.forwarding.close()
    assert front.open() == []
