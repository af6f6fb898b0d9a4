"""Which lane a call begins at: one after another at the same, at the same time at different ones."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest
from proto_fake import FAR, FakeService, rows

from moeserve.proto import moe_pb2
from moeserve.proto.client import AsyncMoeClient, Choice, MoeClient, Patience
from moeserve.proto.client import lanes as module
from moeserve.proto.client.core import Core, Settings
from moeserve.proto.client.lanes import WHOLE, Lanes
from moeserve.proto.errors import REASON_KEY, InvalidArgument, MoeError, NotFound, Overloaded, Unavailable
from moeserve.proto.passes.attached import AttachedLane, Wanted, _place_of

FULL = (grpc.StatusCode.RESOURCE_EXHAUSTED, {REASON_KEY: "lane_full"})
BUSY = Overloaded("RESOURCE_EXHAUSTED", "lane_full", "it is full")


def topology_of(count: int, **fields: int) -> moe_pb2.GetTopologyReply:
    there = [moe_pb2.Lane(rank=at, address=f"lane-{at}") for at in range(count)]
    return moe_pb2.GetTopologyReply(lanes=there, serving=True, **fields)  # type: ignore[arg-type]


class Calls:
    """The lanes of one client, and its calls."""

    def __init__(self, count: int, home: int | None = None) -> None:
        self.lanes: Lanes[str] = Lanes(lambda address, most: address, home)
        self.lanes.found(topology_of(count))
        self.under_way: list[tuple[int, ExitStack]] = []

    @property
    def topology(self) -> moe_pb2.GetTopologyReply:
        assert self.lanes.current is not None
        return self.lanes.current

    def begin(self, bound: int | None = None) -> int:
        call = ExitStack()
        start = call.enter_context(self.lanes.begun(self.topology, bound))
        self.under_way.append((start, call))
        return start

    def end(self, start: int) -> None:
        at = next(at for at, (one, _) in enumerate(self.under_way) if one == start)
        self.under_way.pop(at)[1].close()

    def once(self) -> int:
        self.begin()
        start = self.under_way[-1][0]
        self.end(start)
        return start


def test_calls_one_after_another_go_to_one_lane() -> None:
    calls = Calls(4)
    assert len({calls.once() for _ in range(20)}) == 1
    assert Calls(4, home=3).once() == 3


def test_calls_at_the_same_time_spread_evenly_and_come_back_to_their_lanes() -> None:
    calls = Calls(3)
    assert Counter(calls.begin() for _ in range(9)) == {0: 3, 1: 3, 2: 3}
    for at in range(50):  # each caller has its answer, and calls at once
        done = (7 * at) % 3
        calls.end(done)
        assert calls.begin() == done, "the lane with the fewest calls is the one that has just answered"
    while calls.under_way:
        calls.end(calls.under_way[0][0])
    assert not calls.lanes._under_way


def test_a_call_that_is_bound_counts_at_its_lane_and_moves_nobody() -> None:
    calls = Calls(2, home=1)
    assert calls.begin(bound=0) == 0
    assert [calls.once() for _ in range(3)] == [1, 1, 1]
    assert [calls.begin() for _ in range(3)] == [1, 1, 0], "one is at lane 0 already"
    assert calls.begin(bound=7) == 0, "whether there is such a lane says `pick`"


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_clients_home_is_where_the_front_door_says(count: int) -> None:
    for at in range(count):
        lanes: Lanes[str] = Lanes(lambda address, most: address)
        begin_at = (at * WHOLE + count - 1) // count
        lanes.found(topology_of(count, begin_at=begin_at))
        assert lanes.current is not None and not lanes.current.HasField("begin_at")
        with lanes.begun(lanes.current) as start:
            assert start == at
        current = lanes.current
        lanes.found(topology_of(count, begin_at=0))
        assert lanes.current is current
        with lanes.begun(lanes.current) as start:
            assert start == at, "it is asked again, and stays"


def test_an_older_front_door_says_nothing_and_clients_spread_all_the_same() -> None:
    assert {Calls(2).once() for _ in range(64)} == {0, 1}


def test_clients_spread_anew_when_a_lane_is_back() -> None:
    clients = [Calls(1) for _ in range(64)]
    for one in clients:
        one.lanes.found(topology_of(2))
    assert {one.once() for one in clients} == {0, 1}


@pytest.mark.parametrize(
    ("error", "avoided"),
    [
        (BUSY, True),
        (Unavailable("UNAVAILABLE", "", "gone"), True),
        (MoeError("INTERNAL", "", "broken"), True),
        (InvalidArgument("INVALID_ARGUMENT", "", "no"), False),
        (MoeError("CANCELLED", "", "left"), False),
        (MoeError("DEADLINE_EXCEEDED", "", "late"), False),
    ],
)
def test_a_lane_that_fails_is_avoided_for_a_while(
    monkeypatch: pytest.MonkeyPatch, error: MoeError, avoided: bool
) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    calls = Calls(3, home=2)
    calls.lanes.failed("lane-2", error)
    assert calls.once() == (0 if avoided else 2)
    calls.lanes.failed("lane-0", BUSY)
    calls.lanes.failed("lane-1", BUSY)
    assert calls.once() in ((0, 1, 2) if avoided else (2,)), "where all have failed one is asked all the same"
    now[0] += module.AVOIDED_SECONDS
    assert calls.once() == 2 and not calls.lanes._avoided.get("lane-2")


def test_an_attempt_that_asked_no_lane_tells_nothing_of_one() -> None:
    """A call that is bound to a lane whose rank is away, after an attempt there."""
    core: Core[str] = Core(lambda address, most: address, Settings("", Patience.of(9), 1, "inline"))
    core.lanes.found(topology_of(2))
    hidden, experts, weights = rows(2)
    call = core.call(3, hidden, Choice(experts, weights), {})
    (part,) = call.parts(topology_of(2))
    assert part.aim(topology_of(2))[0] == "lane-1"
    part.failed(BUSY)
    until = dict(core.lanes._avoided)
    assert set(until) == {"lane-1"}
    away = topology_of(1)
    away.away.append(1)
    with pytest.raises(Unavailable) as failed:
        part.aim(away)
    part.failed(failed.value)
    assert core.lanes._avoided == until


def test_lanes_that_go_and_come_change_no_count() -> None:
    calls = Calls(4)
    for _ in range(8):
        calls.begin()
    calls.lanes.found(topology_of(1))
    assert calls.begin() == 0
    while calls.under_way:
        calls.end(calls.under_way[0][0])
    assert not calls.lanes._under_way


def test_a_lane_that_is_not_there_is_named() -> None:
    calls = Calls(2)
    with pytest.raises(NotFound, match=r"lane 7 is not one of the lanes \[0, 1\]"):
        calls.lanes.pick(calls.topology, 7, 0)


@pytest.fixture
def service() -> Iterator[FakeService]:
    made = FakeService(4, host=FAR)
    yield made
    made.stop()


def asked(service: FakeService) -> list[int]:
    return [len(lane.asked) for lane in service.lanes]


def test_the_first_calls_of_many_threads_spread(service: FakeService) -> None:
    for lane in service.lanes:
        lane.scripts = [0.3] * 4
    together = threading.Barrier(16)
    with MoeClient(service.address, timeout=20) as client, ThreadPoolExecutor(16) as pool:

        def call(_: int) -> None:
            together.wait(10)
            client.forward(3, *rows(2))

        list(pool.map(call, range(16)))
    assert asked(service) == [4, 4, 4, 4]


def test_the_first_calls_of_many_tasks_spread(service: FakeService) -> None:
    for lane in service.lanes:
        lane.scripts = [0.5] * 10  # all are under way before one is answered

    async def calls() -> None:
        async with AsyncMoeClient(service.address, timeout=20) as client:
            await asyncio.gather(*(client.forward(3, *rows(2)) for _ in range(40)))

    asyncio.run(calls())
    assert asked(service) == [10, 10, 10, 10]


def test_a_lane_that_refuses_does_not_draw_calls(service: FakeService) -> None:
    """It refuses at once, and so has the fewest calls under way."""
    refuses = service.lanes[1]
    refuses.scripts = [FULL] * 400
    for lane in service.lanes:
        if lane is not refuses:
            lane.scripts = [0.01] * 400
    failed = []
    with MoeClient(service.address, timeout=20) as client, ThreadPoolExecutor(4) as pool:

        def call(_: int) -> None:
            try:
                client.forward(3, *rows(2))
            except Overloaded as full:
                failed.append(full)

        list(pool.map(call, range(200)))
    assert len(failed) == len(refuses.asked) < 20


def test_a_device_lane_of_a_rank_that_is_away_may_be_asked_for_again() -> None:
    service = FakeService(1)
    try:
        service.away = [7]
        with pytest.raises(Unavailable, match=r"rank 7 of .* is away, and waited for; attach again"):
            AttachedLane.attach(service.address, Wanted("x", rank=7, timeout=5.0))
        with pytest.raises(NotFound, match="not rank 8 of"):
            AttachedLane.attach(service.address, Wanted("x", rank=8, timeout=5.0))
    finally:
        service.stop()


@pytest.mark.parametrize("stem", ["decoder-", "torch", "v", "4-"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_callers_whose_names_count_are_spread_evenly(stem: str, ranks: int) -> None:
    found = Counter(_place_of(f"{stem}{at}") % ranks for at in range(9, 9 + 2 * ranks))
    assert set(found.values()) == {2} and len(found) == ranks
    assert _place_of(stem) >= 0 and _place_of(stem * 1000 + "9" * 5000) >= 0
